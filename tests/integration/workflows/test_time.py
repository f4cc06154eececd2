"""Time: an agent's budget, a stalled agent, the renewal of a box's time to live, and the sweep's schedule."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update
from temporalio.client import WorkflowHandle

from ratchet.types import EngineState
from sandboxes.base import Sandbox
from stack import temporal_namespace
from store import schema
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_ledger import boxes_of
from tests.integration.workflows.test_rollout import TASK, call, finish

pytestmark = pytest.mark.timeout(900)

LIMITS = {"agent_seconds": 600, "eval_seconds": 60}
# Leaves a child in a session of its own, and stays in the tool call itself.
BUSY = "echo two > a.txt; (setsid sh -c 'while :; do sleep 0.1; done' >/dev/null 2>&1 &); sleep 900"


async def box_of(loop: Loop, handle: WorkflowHandle[Any, Any]) -> Sandbox:
    """Return the agent's box as soon as its program has called the model."""

    async def asked() -> str | None:
        row = await loop.rollout(handle)
        if row is None:
            return None
        async with loop.database.begin() as connection:
            turns = select(func.count()).where(schema.TurnTable.rollout_id == row.id)
            if not (await connection.execute(turns)).scalar_one():
                return None
        return str((await boxes_of(loop, handle))[0].provider_id)

    return await loop.provider().connect(await loop.until(asked, "the agent asks the model"))


async def holds(box: Sandbox, condition: str) -> bool:
    return (await box.exec(condition, check=False)).exit_code == 0


USE_BUDGET = (
    "cd /run/ratchet/1; read -r began <started; read -r budget <budget;"
    " echo $((${began%.*} - ${budget%.*})).00 >started; echo 0.00 >deadline"
)
"""Lets the agent have begun its budget before it did, and its deadline have come."""


async def test_at_its_deadline_the_whole_tree_stands_still_without_us_and_the_diff_is_taken(loop: Loop) -> None:
    """The box alone enforces the budget: the worker is dead when it is used. The next worker ends the agent, and does
    not take it for stalled."""
    await loop.script(call(BUSY))
    handle = await loop.start(loop.dataset(**TASK), limits={**LIMITS, "stall_seconds": 600.0})
    box = await box_of(loop, handle)
    await loop.until(
        lambda: holds(box, "grep -q two /workspace/repo/a.txt && pgrep -u agent -f 'while :'"),
        "the agent has its edit made",
    )
    loop.end("worker", kill=True)
    await box.exec(USE_BUDGET)
    await loop.until(lambda: holds(box, "test -s /run/ratchet/1/reached"), "the launcher has suspended the tree")
    assert await holds(box, "pgrep -u agent && ! pgrep -u agent -r S,R,D")
    async with loop.database.begin() as connection:
        long_ago = {"created_at": func.now() - timedelta(hours=1), "completed_at": func.now() - timedelta(hours=1)}
        await connection.execute(update(schema.TurnTable).values(long_ago))
    loop.spawn("worker")
    _, row = await finish(loop, handle)
    assert "agent stalled" not in loop.log("worker").read_text()
    assert (row.outcome, row.reward, row.agent_exit, row.attempt) == ("graded", 1.0, "time_budget", 1), (
        row.outcome_reason
    )


async def test_an_agent_that_asks_nothing_is_ended_and_one_that_waits_for_its_model_is_not(loop: Loop) -> None:
    """The time budget is far away in both cases; the model's answer takes longer than the stall limit."""
    stall_seconds = 20.0
    await loop.script(call(BUSY), hold="slow")
    handle = await loop.start(loop.dataset(**TASK), limits={**LIMITS, "stall_seconds": stall_seconds})
    box = await box_of(loop, handle)
    loops = asyncio.get_running_loop()
    patient_until = loops.time() + stall_seconds + 15

    async def still_there() -> bool:
        assert not await holds(box, "test -e /run/ratchet/1/exit.json")
        return loops.time() > patient_until

    await loop.until(still_there, "the model has taken its time")
    await loop.release("slow")
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward, row.agent_exit, row.num_turns) == ("graded", 1.0, "time_budget", 1), (
        row.outcome_reason
    )
    async with loop.database.begin() as connection:
        used = (
            await connection.execute(
                select(schema.AttemptTable.used_seconds).where(schema.AttemptTable.rollout_id == row.id)
            )
        ).scalar_one()
    assert used < LIMITS["agent_seconds"]


async def test_a_wait_for_our_engine_and_a_killed_test_run_cost_no_right_patch_its_reward(loop: Loop) -> None:
    """The guard leaves out the wait, and does not keep the second box from a patch whose tests gave no result."""
    await loop.script(call("echo two > a.txt; sleep 5"), hold="engine")
    await loop.script("Done.")
    task = {"pre_commands": TASK["pre_commands"], "eval_cmd": f"sleep 31; {TASK['eval_cmd']}"}
    limits = {"agent_seconds": 60, "eval_seconds": 60, "guard_seconds": 30}
    handle = await loop.start(loop.dataset(**task), limits=limits)
    await loop.until_a_call_waits(handle)
    address = f"http://127.0.0.1:{loop.stack.ports['engine']}"
    mine = update(schema.EngineTable).where(schema.EngineTable.address == address)
    async with loop.database.begin() as connection:
        await connection.execute(mine.values(state=EngineState.STARTING))
    await loop.release("engine")

    async def has_waited() -> bool:
        async with loop.database.begin() as connection:
            waited = select(schema.SessionTable.engine_wait_seconds).where(schema.SessionTable.rollout_id == rollout_id)
            return bool((await connection.execute(waited)).scalar_one() > 30)

    rollout_id = (await loop.rollout(handle)).id
    await loop.until(has_waited, "the agent has waited for the engine for longer than the guard")
    async with loop.database.begin() as connection:
        await connection.execute(mine.values(state=EngineState.READY))

    async def grading_box() -> str | None:
        return next((one.provider_id for one in await boxes_of(loop, handle) if one.role == "grade"), None)

    grading = await loop.provider().connect(await loop.until(grading_box, "the patch is graded"))
    await loop.until(
        lambda: holds(grading, "test $(ps -o etimes= -C sleep | sort -n | tail -1) -ge 29"), "its time is up"
    )
    await grading.exec("pkill -KILL -f '/run/ratchet/[r]un'", user="root", check=False)
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward) == ("graded", 1.0), row.outcome_reason


async def test_a_watched_box_does_not_end_under_its_agent(loop: Loop) -> None:
    await loop.script("Done.", hold="long")
    handle = await loop.start(loop.dataset(**TASK), limits=LIMITS)
    box = await box_of(loop, handle)
    await box.set_ttl(300)
    environment = loop.environment

    async def seconds_left() -> float:
        async with httpx.AsyncClient(base_url=environment["E2B_API_URL"], trust_env=False, timeout=60) as http:
            facts = (await http.get(f"/sandboxes/{box.id}", headers={"X-API-KEY": environment["E2B_API_KEY"]})).json()
        end = datetime.fromisoformat(facts["endAt"])
        return (end - datetime.now(end.tzinfo)).total_seconds()

    async def extended() -> bool:
        return await seconds_left() > 600

    assert not await extended()
    await loop.until(extended, "the box has its whole time again")
    await loop.release("long")
    _, row = await finish(loop, handle)
    assert (row.outcome, row.agent_exit) == ("graded", "done")


async def test_a_deadline_moves_on_while_the_store_is_away(loop: Loop) -> None:
    """The agent can make no call then, and the time for which it has waited cannot be read."""
    await loop.script(call("echo two > a.txt"), hold="store")
    await loop.script("Done.")
    handle = await loop.start(loop.dataset(**TASK), limits=LIMITS)
    box = await box_of(loop, handle)

    async def deadline() -> float:
        return float((await box.exec("cat /run/ratchet/1/deadline")).stdout)

    before = await deadline()
    loop.end("postgres")
    try:

        async def has_moved() -> bool:
            return await deadline() > before + 10

        await loop.until(has_moved, "the deadline is later")
    finally:
        loop.spawn("postgres")
    await loop.database.wait()
    await loop.release("store")
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward, row.agent_exit, row.attempt) == ("graded", 1.0, "done", 1), row.outcome_reason


async def test_an_agent_that_the_guard_ends_before_its_budget_is_used_gets_no_reward(loop: Loop) -> None:
    """It has made the right edit; a box that was lost leaves the next agent less than its budget in the same way."""
    await loop.script(call(BUSY))
    handle = await loop.start(loop.dataset(**TASK), limits={**LIMITS, "guard_seconds": 25.0})
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward, row.agent_exit, row.attempt) == ("infra_failed", None, None, 1), row.outcome_reason
    assert "the rollout's guard ended the agent" in row.outcome_reason


async def test_the_sweeps_schedule_follows_the_settings(loop: Loop) -> None:
    async def seen() -> tuple[timedelta, timedelta, bool]:
        found = (await handle.describe()).schedule
        return found.spec.intervals[0].every, found.policy.catchup_window, found.state.paused

    handle = loop.client.get_schedule_handle(temporal_namespace.SWEEP_SCHEDULE)
    await handle.pause()
    numbers = loop.settings.sweep.model_copy(update={"interval": 777, "catchup_window": 33})
    changed = loop.settings.model_copy(update={"sweep": numbers})
    await temporal_namespace.prepare_namespace(loop.client, loop.database, changed, is_own=True)
    assert await seen() == (timedelta(seconds=777), timedelta(seconds=33), True)
    await handle.unpause()
    await temporal_namespace.prepare_namespace(loop.client, loop.database, loop.settings, is_own=True)
    assert await seen() == (timedelta(seconds=3600), timedelta(seconds=60), False)
