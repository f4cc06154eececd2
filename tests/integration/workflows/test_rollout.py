"""One rollout through real boxes, git and graders: its outcome if all goes well, and if something dies."""

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import InstrumentedAttribute
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.testing import ActivityEnvironment

from activities.box_lifecycle import BoxCreator
from activities.grade import GradeActivities
from activities.run_configs import RunConfigs
from grading.registry import GRADERS
from ratchet.payloads import StageInput
from ratchet.temporal_client import root_cause
from ratchet.types import FAILED_OUTCOMES, SandboxRole
from store import open_runs, rollouts, sandboxes
from store.sandboxes import NewSandbox
from store.schema import (
    AttemptTable,
    ChainSpanTable,
    GradeTable,
    InstallationTable,
    PatchTable,
    SandboxTable,
    SessionTable,
    TurnTable,
)
from tests.integration.workflows.conftest import Loop

pytestmark = pytest.mark.timeout(600)

PRE = "git init -q . && echo one > a.txt && git add -A && git -c user.name=x -c user.email=x@x commit -qm first"
TASK = {"pre_commands": [PRE], "eval_cmd": 'test "$(cat a.txt)" = two'}


def call(command: str) -> str:
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


async def finish(loop: Loop, handle: WorkflowHandle[Any, Any]) -> Any:
    """Return the rollout's result, None if it got no verdict, and its row. Its workflow fails then, and only then."""
    result = None
    try:
        result = await loop.result(handle)
    except WorkflowFailureError as error:
        assert isinstance(error.cause, ApplicationError) and error.cause.type in FAILED_OUTCOMES, error.cause
    row = await loop.rollout(handle)
    assert (result is None) == (row.outcome in FAILED_OUTCOMES)
    return result, row


async def of_attempts(loop: Loop, rollout_id: int, column: InstrumentedAttribute[Any]) -> list[Any]:
    """Return one column of the rollout's attempts, in their order."""
    statement = select(column).where(AttemptTable.rollout_id == rollout_id).order_by(AttemptTable.n)
    async with loop.database.begin() as connection:
        return list((await connection.execute(statement)).scalars())


async def test_a_solved_task(loop: Loop) -> None:
    await loop.script(call("echo two > a.txt"), "Done.")
    _, row = await finish(loop, await loop.start(loop.dataset(**TASK)))
    assert (row.outcome, row.reward, row.agent_exit, row.num_turns, row.num_chains) == ("graded", 1.0, "done", 2, 1)
    async with loop.database.begin() as connection:
        trained = select(func.sum(ChainSpanTable.length)).where(ChainSpanTable.trained)
        trained = trained.where(ChainSpanTable.turn_id.in_(select(TurnTable.id).where(TurnTable.rollout_id == row.id)))
        sampled = select(func.sum(TurnTable.num_sampled)).where(TurnTable.rollout_id == row.id)
        assert (
            (await connection.execute(trained)).scalar_one()
            == (await connection.execute(sampled)).scalar_one()
            == row.num_trained_tokens
        )
        boxes = (
            await connection.execute(
                select(SandboxTable.state, SandboxTable.role).where(SandboxTable.rollout_id == row.id)
            )
        ).all()
        assert sorted(boxes) == [("released", "agent"), ("released", "grade")]
        assert (
            await connection.execute(select(SessionTable.state).where(SessionTable.rollout_id == row.id))
        ).scalar_one() == "closed"


async def test_nothing_done_is_a_verdict_not_a_failure(loop: Loop) -> None:
    await loop.script("I give up.")
    _, row = await finish(loop, await loop.start(loop.dataset(**TASK)))
    assert (row.outcome, row.reward) == ("graded", 0.0)
    async with loop.database.begin() as connection:
        assert (
            await connection.execute(select(PatchTable.num_bytes).where(PatchTable.rollout_id == row.id))
        ).scalar_one() == 0


async def test_a_first_prompt_that_does_not_fit_is_the_configs_fault_and_no_zero(loop: Loop) -> None:
    """The policy has not answered yet, so no box more is tried, and the reason names what to change."""
    dataset = loop.dataset(pre_commands=[PRE], eval_cmd="true", problem_statement="word " * 400)
    _, row = await finish(
        loop, await loop.start(dataset, sampling={"max_context_tokens": 256, "max_response_tokens": 64})
    )
    assert (row.outcome, row.reward, row.num_turns) == ("infra_failed", None, 0)
    assert "prompt is too long" in row.outcome_reason and "max_context_tokens is 256" in row.outcome_reason
    assert len(await of_attempts(loop, row.id, AttemptTable.agent_exit)) == 1


async def test_whatever_the_agent_does_to_git_its_files_count(loop: Loop) -> None:
    """Staged, committed, new, deleted, binary and mode changes are in one patch, which applies in the fresh box."""
    pre = (
        PRE + " && echo gone > b.txt && echo 'echo hi' > run.sh && git add -A && git -c user.name=x -c user.email=x@x"
        " commit -qm second"
    )
    work = (
        "echo two > a.txt && git add a.txt && git -c user.name=x -c user.email=x@x commit -qm mine && rm b.txt"
        " && printf '\\000\\001\\377' > new.bin && chmod +x run.sh && mkdir 'd ir' && echo späß > 'd ir/ü.txt' &&"
        " git add new.bin && rm -rf .git"
    )
    check = (
        'test "$(cat a.txt)" = two && test ! -e b.txt && test -x run.sh && test "$(od -An -tx1 new.bin)" = " 00 01 ff"'
        " && test \"$(cat 'd ir/ü.txt')\" = späß && test ! -e PROBLEM_STATEMENT.md"
    )
    await loop.script(call(work), "Done.")
    _, row = await finish(loop, await loop.start(loop.dataset(pre_commands=[pre], eval_cmd=check)))
    async with loop.database.begin() as connection:
        log = (await connection.execute(select(GradeTable.reason).where(GradeTable.rollout_id == row.id))).scalar_one()
    assert (row.outcome, row.reward) == ("graded", 1.0), log


async def test_the_agents_box_has_no_history_and_no_grader(loop: Loop) -> None:
    history = "git log --oneline | wc -l; git remote | wc -l; ls .git/logs 2>/dev/null | wc -l"
    grader = "grep -rl SECRET /workspace /tmp /home -s 2>/dev/null | head -1; cat PROBLEM_STATEMENT.md"
    await loop.script(call(f"({history}; {grader}) > a.txt"), "Done.")
    dataset = loop.dataset(pre_commands=[PRE], eval_cmd="cat a.txt; echo; echo SECRET; echo ok 1")
    _, row = await finish(loop, await loop.start(dataset))
    async with loop.database.begin() as connection:
        from store.arrays import unpack_text

        log = unpack_text(
            (await connection.execute(select(GradeTable.log).where(GradeTable.rollout_id == row.id))).scalar_one()
        )
    assert log.split("\n")[:4] == ["1", "0", "0", "make it right"], log


async def test_a_stored_verdict_whose_answer_was_lost_is_not_given_again(loop: Loop) -> None:
    """As when Temporal is away while the verdict is stored: the workflow asks for another grading box."""
    await loop.script(call("echo two > a.txt"), "Done.")
    handle = await loop.start(loop.dataset(**TASK))
    _, row = await finish(loop, handle)
    provider = loop.provider()
    configs = RunConfigs(loop.database, loop.settings)
    async with loop.database.begin() as connection:
        patch = await rollouts.patch_of_attempt(connection, row.id, 1)
        assert patch is not None
        new = NewSandbox(provider.name, SandboxRole.GRADE, row.id, 1, handle.id, "host")
        box = await sandboxes.reserve_sandbox(connection, new, max_boxes=99, max_boots=99)
        assert box is not None
    await BoxCreator(loop.database, provider).create(box, "host", ttl_seconds=600, network=False)
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, workflow_id=handle.id, workflow_type="Rollout")
    again = StageInput(rollout_id=row.id, attempt=1, sandbox_id=box.id, patch_id=patch.id, role=SandboxRole.GRADE)
    result = await environment.run(GradeActivities(loop.database, provider, configs, GRADERS).grade, again)
    async with loop.database.begin() as connection:
        statement = select(GradeTable.id).where(GradeTable.rollout_id == row.id)
        assert (await connection.execute(statement)).scalars().all() == [result.grade_id] == [row.grade_id]
        state = select(SandboxTable.state).where(SandboxTable.id == box.id)
        assert (await connection.execute(state)).scalar_one() == "released"


async def test_a_grader_that_cannot_run_gives_no_reward(loop: Loop) -> None:
    await loop.script("Done.")
    _, row = await finish(loop, await loop.start(loop.dataset(pre_commands=[PRE], eval_cmd="no-such-program --at-all")))
    assert (row.outcome, row.reward) == ("grader_failed", None)
    assert "no-such-program" in row.outcome_reason
    async with loop.database.begin() as connection:
        roles = (
            await connection.execute(
                select(SandboxTable.role, func.count())
                .where(SandboxTable.rollout_id == row.id)
                .group_by(SandboxTable.role)
            )
        ).all()
        assert dict(roles) == {"agent": 1, "grade": 3}, "a grader's fault costs no agent tokens"
        reasons = select(SandboxTable.release_reason).where(
            SandboxTable.rollout_id == row.id, SandboxTable.role == "grade"
        )
        assert (await connection.execute(reasons)).scalars().all() == ["no verdict"] * 3, (
            "each is given back before the next is asked for"
        )


async def test_a_reward_function_that_breaks_gives_no_reward_and_is_named(loop: Loop) -> None:
    await loop.script(call("echo two > a.txt"), "Done.")
    grading = {"reward": "tests.standins.rewards:breaks"}
    _, row = await finish(loop, await loop.start(loop.dataset(**TASK), grading=grading))
    assert (row.outcome, row.reward) == ("grader_failed", None)
    assert row.outcome_reason == "grading.reward: 'tests.standins.rewards:breaks' failed: KeyError: 'bonus'"


async def test_broken_pre_commands_give_no_reward(loop: Loop) -> None:
    _, row = await finish(loop, await loop.start(loop.dataset(pre_commands=["echo nope >&2; exit 9"], eval_cmd="true")))
    assert (row.outcome, row.reward) == ("infra_failed", None)
    assert "nope" in row.outcome_reason
    async with loop.database.begin() as connection:
        states = (
            (await connection.execute(select(SandboxTable.state).where(SandboxTable.rollout_id == row.id)))
            .scalars()
            .all()
        )
        assert states == ["released"] * 3


async def test_tests_that_take_too_long_are_not_solved(loop: Loop) -> None:
    await loop.script("Done.")
    dataset = loop.dataset(pre_commands=[PRE], eval_cmd="sleep 60")
    _, row = await finish(loop, await loop.start(dataset, limits={"agent_seconds": 60, "eval_seconds": 1}))
    assert (row.outcome, row.reward) == ("graded", 0.0)
    assert "longer than 1 s" in row.outcome_reason


async def test_a_vanished_box_is_replaced_and_its_turns_do_not_count(loop: Loop) -> None:
    await loop.script("never delivered", hold="vanish")
    handle = await loop.start(loop.dataset(**TASK))

    async def in_flight() -> Any:
        row = await loop.rollout(handle)
        if row is None:
            return None
        async with loop.database.begin() as connection:
            flying = select(TurnTable.id).where(TurnTable.rollout_id == row.id, TurnTable.state == "in_flight")
            if (await connection.execute(flying)).scalar_one_or_none() is None:
                return None
            return (
                await connection.execute(select(SandboxTable.provider_id).where(SandboxTable.rollout_id == row.id))
            ).scalar_one()

    box = await loop.until(in_flight, "the agent waits for its model")
    await loop.script(call("echo two > a.txt"), "Done.")
    assert await loop.provider().kill(box)
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward, row.attempt, row.num_turns) == ("graded", 1.0, 2, 2)
    assert await of_attempts(loop, row.id, AttemptTable.state) == ["superseded", "sealed"]


async def test_a_killed_worker_starts_no_second_agent(loop: Loop) -> None:
    """After a kill -9 of the worker the next try re-attaches to the same process in the same box."""
    await loop.script(call("echo two > a.txt; echo $PPID >> /tmp/started"), "Done.", hold="worker")
    handle = await loop.start(loop.dataset(**TASK))

    async def waits() -> bool:
        row = await loop.rollout(handle)
        if row is None:
            return False
        async with loop.database.begin() as connection:
            return bool(
                (await connection.execute(select(func.count()).where(TurnTable.rollout_id == row.id))).scalar_one()
            )

    await loop.until(waits, "the agent waits for its model")
    loop.end("worker", kill=True)
    await loop.release("worker")
    loop.spawn("worker")
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward, row.attempt, row.num_turns) == ("graded", 1.0, 1, 2)
    async with loop.database.begin() as connection:
        assert (
            await connection.execute(select(func.count()).where(SandboxTable.rollout_id == row.id))
        ).scalar_one() == 2


async def test_an_agent_whose_deadline_came_while_the_stack_was_away_goes_on(loop: Loop) -> None:
    """Box and launcher run on without adapter and worker, so the agent is suspended at its deadline until a worker
    knows for how long it waited."""
    await loop.script("never delivered", hold="away")
    handle = await loop.start(loop.dataset(**TASK), limits={"agent_seconds": 8, "eval_seconds": 20})

    async def waits() -> Any:
        row = await loop.rollout(handle)
        if row is None:
            return None
        async with loop.database.begin() as connection:
            if not (await connection.execute(select(func.count()).where(TurnTable.rollout_id == row.id))).scalar_one():
                return None
            return (
                await connection.execute(select(SandboxTable.provider_id).where(SandboxTable.rollout_id == row.id))
            ).scalar_one()

    box_id = await loop.until(waits, "the agent waits for its model")
    loop.end("worker", kill=True)
    loop.end("adapter", kill=True)
    box = await loop.provider().connect(box_id)

    async def suspended() -> bool:
        return (await box.exec("test -e /run/ratchet/1/reached", user="root", check=False)).exit_code == 0

    await loop.until(suspended, "the launcher has suspended the agent")
    await box.close()
    async with loop.database.begin() as connection:  # an hour has passed
        await connection.execute(update(InstallationTable).values(adapter_seen_at=func.now() - timedelta(hours=1)))
    await loop.script(call("echo two > a.txt"), "Done.")
    loop.spawn("adapter")

    async def seen() -> bool:
        async with loop.database.begin() as connection:
            beat = select(func.now() - InstallationTable.adapter_seen_at < timedelta(minutes=1))
            return bool((await connection.execute(beat)).scalar_one())

    await loop.until(seen, "the adapter is there again")
    loop.spawn("worker")
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward, row.attempt, row.num_turns) == ("graded", 1.0, 1, 2)
    assert await of_attempts(loop, row.id, AttemptTable.agent_exit) == ["done"]


async def test_cancelling_records_it_and_releases_the_box(loop: Loop) -> None:
    await loop.script("never", hold="cancel")
    handle = await loop.start(loop.dataset(**TASK))
    await loop.until_a_call_waits(handle)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await loop.result(handle, 200)
    row = await loop.rollout(handle)
    assert (row.outcome, row.reward) == ("cancelled", None)
    async with loop.database.begin() as connection:
        assert (
            await connection.execute(select(SandboxTable.state).where(SandboxTable.rollout_id == row.id))
        ).scalars().all() == ["released"]
        assert (
            await connection.execute(select(TurnTable.state).where(TurnTable.rollout_id == row.id))
        ).scalars().all() == ["aborted"]


async def test_the_sweep_ends_what_a_terminated_workflow_left(loop: Loop) -> None:
    await loop.script("never", hold="terminate")
    handle = await loop.start(loop.dataset(**TASK))

    async def live() -> bool:
        row = await loop.rollout(handle)
        if row is None:
            return False
        async with loop.database.begin() as connection:
            return bool(
                (await connection.execute(select(func.count()).where(TurnTable.rollout_id == row.id))).scalar_one()
            )

    await loop.until(live, "the agent waits for its model")
    await handle.terminate("in the UI")
    result = await loop.client.execute_workflow("Sweep", {"force": True}, id="sweep/test", task_queue="control")
    assert result["rollouts_ended"] == 1 and result["boxes_released"] == 1, result
    row = await loop.rollout(handle)
    assert (row.outcome, row.outcome_reason, row.reward) == ("infra_failed", "workflow_terminated", None)
    again = await loop.client.execute_workflow("Sweep", {}, id="sweep/again", task_queue="control")
    assert not any(again.values()), again


@pytest.mark.parametrize(
    ("workflow", "argument", "named"),
    [
        ("Rollout", {"dataset": "x.jsonl", "tsk": 1}, "tsk"),
        ("Rollout", {}, "give dataset and task"),
        ("Rollout", {"dataset": "/nowhere.jsonl", "task": 0}, "/nowhere.jsonl does not exist"),
        ("TrainRun", {"config": {"datasets": [], "wrong": 1}}, "wrong"),
        ("TrainRun", {"config_path": "/nowhere.yaml"}, "/nowhere.yaml"),
        ("TrainRun", {"config_path": "a", "run_id": "b"}, "exactly one of"),
    ],
)
async def test_bad_json_ends_failed_with_the_field_named(
    loop: Loop, workflow: str, argument: dict[str, Any], named: str
) -> None:
    handle = await loop.client.start_workflow(
        workflow, argument, id=f"run/bad-{workflow}-{abs(hash(named))}", task_queue="control"
    )
    with pytest.raises(WorkflowFailureError):
        await loop.result(handle, 120)
    history = await handle.fetch_history()
    assert named in str(history.events[-1].workflow_execution_failed_event_attributes), history.events[-1]


async def test_a_finished_rollout_is_not_run_again(loop: Loop) -> None:
    """A second execution of its workflow returns the stored outcome and boots no box; another workflow gets nothing."""
    await loop.script(call("echo two > a.txt"), "Done.")
    handle = await loop.start(loop.dataset(**TASK))
    _, row = await finish(loop, handle)
    again = await loop.client.execute_workflow("Rollout", {"rollout_id": row.id}, id=handle.id, task_queue="control")
    with pytest.raises(WorkflowFailureError):
        await loop.client.execute_workflow("Rollout", {"rollout_id": row.id}, id="rollout/other", task_queue="control")
    assert (again["outcome"], again["reward"]) == ("graded", 1.0)
    async with loop.database.begin() as connection:
        assert (
            await connection.execute(select(func.count()).where(SandboxTable.rollout_id == row.id))
        ).scalar_one() == 2


async def test_a_restart_after_the_diff_keeps_the_agents_turns(loop: Loop) -> None:
    """After a reset in the UI during grading the stored patch is graded, and its chains are those of its own turns."""
    await loop.script(call("echo two > a.txt"), "Done.")
    handle = await loop.start(loop.dataset(**{**TASK, "eval_cmd": f"sleep 5; {TASK['eval_cmd']}"}))

    async def patch_stored() -> int | None:
        row = await loop.rollout(handle)
        if row is None:
            return None
        async with loop.database.begin() as connection:
            return (
                await connection.execute(select(PatchTable.rollout_id).where(PatchTable.rollout_id == row.id))
            ).scalar_one_or_none()

    rollout_id = await loop.until(patch_stored, "the patch is stored")
    await handle.terminate()
    again = await loop.client.start_workflow("Rollout", {"rollout_id": rollout_id}, id=handle.id, task_queue="control")
    await loop.result(again, 200)
    row = await loop.rollout(handle)
    assert (row.outcome, row.reward, row.agent_exit, row.attempt) == ("graded", 1.0, "done", 2)
    assert row.num_turns == 2 and row.num_trained_tokens > 0
    async with loop.database.begin() as connection:
        unfinished = await open_runs.unfinished_runs(connection)
    assert row.run_id not in unfinished, "a single rollout's run is nothing to train on"


async def test_a_rollout_that_is_started_anew_holds_nothing_of_its_last_life(loop: Loop) -> None:
    """The boxes of the earlier workflow run are released by the claim; the sweep would spare those of a running
    workflow."""
    await loop.script("never delivered", hold="last life")
    handle = await loop.start(loop.dataset(**TASK))

    async def waits() -> int | None:
        row = await loop.rollout(handle)
        if row is None:
            return None
        async with loop.database.begin() as connection:
            flying = select(TurnTable.rollout_id).where(TurnTable.rollout_id == row.id, TurnTable.state == "in_flight")
            return (await connection.execute(flying)).scalar_one_or_none()

    rollout_id = await loop.until(waits, "the agent waits for its model")
    await handle.terminate()
    await loop.script("never delivered either", hold="this life")
    again = await loop.client.start_workflow("Rollout", {"rollout_id": rollout_id}, id=handle.id, task_queue="control")

    async def works() -> bool:
        async with loop.database.begin() as connection:
            flying = select(TurnTable.attempt).where(TurnTable.rollout_id == rollout_id, TurnTable.state == "in_flight")
            return list((await connection.execute(flying)).scalars()) == [2]

    await loop.until(works, "the new life's agent waits for its model")
    async with loop.database.begin() as connection:
        boxes = select(SandboxTable.state).where(SandboxTable.rollout_id == rollout_id).order_by(SandboxTable.id)
        sessions = (
            select(SessionTable.state).where(SessionTable.rollout_id == rollout_id).order_by(SessionTable.attempt)
        )
        assert (await connection.execute(boxes)).scalars().all() == ["release_wanted", "live"]
        assert (await connection.execute(sessions)).scalars().all() == ["closed", "open"]
    await again.cancel()
    with pytest.raises(WorkflowFailureError):
        await loop.result(again, 100)
    for hold in ("last life", "this life"):
        await loop.release(hold)


async def test_a_dataset_that_has_changed_is_read_again(loop: Loop) -> None:
    path = Path(loop.dataset(**TASK))
    await loop.script("Done.", "Done.")
    first = await loop.start(str(path))
    await finish(loop, first)
    path.write_text(path.read_text().replace('"make it right"', '"make it two"'))
    _, row = await finish(loop, await loop.start(str(path)))
    assert row.outcome == "graded"
    assert row.run_id == (await loop.rollout(first)).run_id and row.task_id != (await loop.rollout(first)).task_id


async def test_the_schema_refuses_a_reward_without_a_verdict(loop: Loop) -> None:
    from sqlalchemy.exc import IntegrityError

    await loop.script("Done.")
    _, row = await finish(loop, await loop.start(loop.dataset(**TASK)))
    for change in ("outcome = 'infra_failed'", "reward = NULL", "reward = 'NaN'", "outcome = 'fine'"):
        with pytest.raises(IntegrityError):
            async with loop.database.begin() as connection:
                await connection.execute(text(f"UPDATE rollout SET {change} WHERE id = :id"), {"id": row.id})


async def test_search_attributes_are_visible(loop: Loop) -> None:
    await loop.script("Done.")
    handle = await loop.start(loop.dataset(**TASK))
    await finish(loop, handle)

    async def listed() -> bool:
        try:
            found = [
                one
                async for one in loop.client.list_workflows(
                    f"ratchet_outcome = 'graded' AND WorkflowId = '{handle.id}'"
                )
            ]
        except RPCError:
            return False
        return len(found) == 1

    await loop.until(listed, "visibility shows the rollout")


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"model": "/models/other"}, "model /models/other"), ({"policy_version": "run/3.e1"}, "policy version run/3.e1")],
)
async def test_a_rollout_under_weights_that_are_not_served_is_refused(
    loop: Loop, asked: dict[str, str], named: str
) -> None:
    argument = {"dataset": loop.dataset(**TASK), "task": 0, "config": {"model": str(loop.model)}, **asked}
    handle = await loop.client.start_workflow(
        "Rollout", argument, id=f"rollout/adhoc/{uuid4().hex[:8]}", task_queue="control"
    )
    with pytest.raises(WorkflowFailureError) as refused:
        await loop.result(handle, 100)
    assert f"{named} is not served; the engines of set default serve" in str(root_cause(refused.value))
