"""No box leaks: a worker is killed while it creates, uses or kills a box; after one sweep no box of this installation
is left and the ledger agrees.

The worker's position at the kill is arranged: the gateway is stopped, so that a call to it hangs, or an update of the
ledger waits in a trigger for a lock that the test holds.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import func, select, text
from temporalio.client import Client, WorkflowHandle
from temporalio.testing import ActivityEnvironment

from activities.box_lifecycle import INSTALLATION_KEY
from activities.sweep import SweepActivities
from ratchet import temporal_client
from ratchet.sweep_payloads import SweepInput
from store import installations, rollouts, runs
from store.schema import RolloutTable, SandboxTable, TurnTable
from tests.integration.training.records import make_group
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import TASK, call, finish

pytestmark = pytest.mark.timeout(600)

_LOCK = 7_204_116
_ESTABLISHED = "01"
_TRIGGER = """
CREATE OR REPLACE FUNCTION wait_for_the_test() RETURNS trigger AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared({lock}); RETURN NEW; END $$ LANGUAGE plpgsql;
CREATE TRIGGER wait_for_the_test BEFORE UPDATE OF state ON sandbox FOR EACH ROW
WHEN (NEW.state = '{state}') EXECUTE FUNCTION wait_for_the_test()
"""
_WAITING = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = :lock AND NOT granted")


@pytest.fixture(autouse=True)
async def _boxes_of_earlier_tests_are_gone(loop: Loop) -> None:
    """These tests count the boxes of the installation; an earlier test may end while its box is being released."""
    held = select(func.count()).where(SandboxTable.state != "released")

    async def none_is_held() -> bool:
        async with loop.database.begin() as connection:
            return (await connection.execute(held)).scalar_one() == 0

    await loop.until(none_is_held, "earlier tests' boxes are released")


async def installation_of(loop: Loop) -> str:
    async with loop.database.begin() as connection:
        return str(await installations.installation_id(connection))


async def sweep(loop: Loop) -> dict[str, Any]:
    found = await loop.client.execute_workflow(
        "Sweep", {"force": True}, id=f"sweep/{uuid4().hex[:8]}", task_queue="control"
    )
    return dict(found)


async def assert_nothing_is_left(loop: Loop) -> None:
    listed = await loop.provider().list({INSTALLATION_KEY: await installation_of(loop)})
    async with loop.database.begin() as connection:
        held = (
            await connection.execute(
                select(SandboxTable.id, SandboxTable.state).where(SandboxTable.state != "released")
            )
        ).all()
    assert (listed, held) == ([], [])


async def boxes_of(loop: Loop, handle: WorkflowHandle[Any, Any]) -> list[Any]:
    async with loop.database.begin() as connection:
        return list(
            (
                await connection.execute(
                    select(SandboxTable).where(SandboxTable.workflow_id == handle.id).order_by(SandboxTable.id)
                )
            ).all()
        )


@contextlib.contextmanager
def _stopped_gateway(loop: Loop) -> Iterator[None]:
    """Stop a process: the kernel accepts calls to it, and they get no answer."""
    process = loop.processes["gateway"]
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def call_hangs(loop: Loop) -> bool:
    """Return whether a connection to the gateway has unread bytes."""
    port = f":{loop.stack.ports['gateway']:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(port) and fields[3] == _ESTABLISHED and int(fields[4].split(":")[1], 16) > 0:
            return True
    return False


@contextlib.asynccontextmanager
async def _held_update(loop: Loop, state: str) -> AsyncIterator[None]:
    """Keep ledger rows from becoming `state` while the block runs: such a transaction waits."""
    statements = _TRIGGER.format(lock=_LOCK, state=state).split(";\nCREATE TRIGGER")
    async with loop.database.begin() as connection:
        await connection.execute(text(statements[0]))
        await connection.execute(text("CREATE TRIGGER" + statements[1]))
    try:
        async with loop.database.begin() as connection:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            yield
    finally:
        async with loop.database.begin() as connection:
            await connection.execute(text("DROP TRIGGER wait_for_the_test ON sandbox"))


async def update_waits(loop: Loop) -> bool:
    async with loop.database.begin() as connection:
        return bool((await connection.execute(_WAITING, {"lock": _LOCK})).scalar_one())


async def works(loop: Loop, handle: WorkflowHandle[Any, Any]) -> bool:
    row = await loop.rollout(handle)
    if row is None:
        return False
    async with loop.database.begin() as connection:
        return bool((await connection.execute(select(func.count()).where(TurnTable.rollout_id == row.id))).scalar_one())


async def _kill_worker_in_create(loop: Loop) -> WorkflowHandle[Any, Any]:
    """The box is created after its worker died, so its id is not stored."""
    # Before its first box a worker asks whose gateway it is; that call must not be the one that hangs.
    await finish(loop, await loop.start(loop.dataset(**{**TASK, "pre_commands": ["false"]})))
    ours = {INSTALLATION_KEY: await installation_of(loop)}
    with _stopped_gateway(loop):
        handle = await loop.start(loop.dataset(**TASK))

        async def asked() -> bool:
            return bool(await boxes_of(loop, handle)) and await call_hangs(loop)

        await loop.until(asked, "the create call hangs")
        await asyncio.sleep(1)  # on a busy machine, the rest of the request may follow its first bytes
        loop.end("worker", kill=True)

    async def made() -> bool:
        return len(await loop.provider().list(ours)) == 1

    await loop.until(made, "the gateway makes the box that it was asked for")
    (row,) = await boxes_of(loop, handle)
    assert (row.state, row.provider_id) == ("creating", None)
    return handle


async def test_killed_in_create_the_next_try_adopts_the_box(loop: Loop) -> None:
    await loop.script(call("echo two > a.txt"), "Done.")
    handle = await _kill_worker_in_create(loop)
    (orphan,) = await loop.provider().list({INSTALLATION_KEY: await installation_of(loop)})
    loop.spawn("worker")
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward, row.attempt) == ("graded", 1.0, 1)
    boxes = await boxes_of(loop, handle)
    assert [(box.role, box.provider_id == orphan.id) for box in boxes] == [("agent", True), ("grade", False)]
    await sweep(loop)
    await assert_nothing_is_left(loop)


async def test_killed_in_create_and_terminated(loop: Loop) -> None:
    handle = await _kill_worker_in_create(loop)
    await handle.terminate("in the UI")
    loop.spawn("worker")
    dry = await loop.client.execute_workflow(
        "Sweep", {"force": True, "dry_run": True}, id=f"sweep/{uuid4().hex[:8]}", task_queue="control"
    )
    assert len(dry["boxes"]) == 1 and handle.id in dry["boxes"][0]
    assert len(await loop.provider().list({INSTALLATION_KEY: await installation_of(loop)})) == 1, (
        "a dry run ends nothing"
    )
    result = await sweep(loop)
    assert (result["boxes_released"], result["rollouts_ended"]) == (1, 1), result
    await assert_nothing_is_left(loop)


async def test_killed_in_run_and_terminated(loop: Loop) -> None:
    await loop.script("never", hold="ledger")
    handle = await loop.start(loop.dataset(**TASK))
    await loop.until(lambda: works(loop, handle), "the agent waits for its model")
    loop.end("worker", kill=True)
    await handle.terminate("in the UI")
    loop.spawn("worker")
    result = await sweep(loop)
    await loop.release("ledger")
    assert (result["boxes_released"], result["rollouts_ended"], result["sessions_closed"]) == (1, 1, 1), result
    await assert_nothing_is_left(loop)


@pytest.mark.parametrize("moment", ["before the box is gone", "after the box is gone"])
async def test_killed_in_kill(loop: Loop, moment: str) -> None:
    """Kill once between the release mark and the kill of the box, and once between the kill and its record."""
    await loop.script(call("echo two > a.txt"), "Done.")
    async with _held_update(loop, "release_wanted" if moment.startswith("before") else "released"):
        handle = await loop.start(loop.dataset(**TASK))
        await loop.until(lambda: update_waits(loop), "a release is on its way")
        if moment.startswith("before"):
            loop.processes["gateway"].send_signal(signal.SIGSTOP)
        else:
            loop.end("worker", kill=True)
    if moment.startswith("before"):
        await loop.until(lambda: call_hangs(loop), "the kill call hangs")
        loop.end("worker", kill=True)
        loop.end("gateway", kill=True)  # with the call that it never read
        loop.spawn("gateway")
    await handle.terminate("in the UI")
    states = [box.state for box in await boxes_of(loop, handle)]
    assert states == ["release_wanted"], states
    await loop.until(lambda: _answers(loop), "the gateway is back")
    alive = await loop.provider().list({INSTALLATION_KEY: await installation_of(loop)})
    assert len(alive) == (1 if moment.startswith("before") else 0)
    loop.spawn("worker")
    assert (await sweep(loop))["boxes_released"] == 1
    await assert_nothing_is_left(loop)


async def test_a_rollout_that_is_taken_up_while_the_sweep_asks_is_left_alone(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loop.script("never delivered", hold="sweep asks")
    handle = await loop.start(loop.dataset(**TASK))
    await loop.until(lambda: works(loop, handle), "the agent waits for its model")
    await handle.terminate()
    rollout_id = (await loop.rollout(handle)).id
    activities = SweepActivities(loop.database, loop.provider(), loop.settings, loop.client)
    ask = temporal_client.open_workflows

    async def ask_too_long(client: Client, workflow_ids: set[str]) -> set[str]:
        alive = await ask(client, workflow_ids)
        async with loop.database.begin() as connection:
            await rollouts.claim_rollout(connection, rollout_id, handle.id, "another life")
        return alive

    async def outcome_after_a_sweep() -> str | None:
        await ActivityEnvironment().run(activities.sweep, SweepInput(force=True))
        return (await loop.rollout(handle)).outcome

    monkeypatch.setattr(temporal_client, "open_workflows", ask_too_long)
    assert await outcome_after_a_sweep() is None
    monkeypatch.undo()
    assert await outcome_after_a_sweep() == "infra_failed"
    await loop.release("sweep asks")
    await assert_nothing_is_left(loop)


async def _answers(loop: Loop) -> bool:
    from ratchet.errors import SandboxBusyError

    try:
        await loop.provider().list({})
    except SandboxBusyError:
        return False
    return True


async def test_two_installations_share_a_provider(loop: Loop) -> None:
    """Boxes of other installations and unmarked boxes are spared; an unknown box of this installation is killed."""
    provider, ours = loop.provider(), await installation_of(loop)
    marks = {
        "ours": {INSTALLATION_KEY: ours, "ratchet_box": str(uuid4())},
        "theirs": {INSTALLATION_KEY: str(uuid4())},
        "nobody's": {},
    }
    made = {
        name: await provider.create("host", ttl_seconds=300, metadata=metadata, idempotency_key=uuid4().hex)
        for name, metadata in marks.items()
    }
    try:
        result = await sweep(loop)
        assert (result["boxes_released"], result["boxes_unknown"]) == (0, 1), json.dumps(result)
        listed = {info.id for info in await provider.list({})}
        assert made["ours"].id not in listed
        assert {made["theirs"].id, made["nobody's"].id} <= listed
    finally:
        await asyncio.gather(*(box.kill() for box in made.values()))
    await assert_nothing_is_left(loop)


async def test_a_sweep_prunes_runs_that_are_done_for_long(loop: Loop, run_id: str) -> None:
    async with loop.database.begin() as connection:
        await runs.create_run(connection, runs.NewRun(run_id, {"training": {}}, "d", "c", 0, ""))
        group_id = await make_group(connection, run_id, 0, [0.0, 1.0])
        ended = text("UPDATE run SET state = 'done', ended_at = now() - interval '99 days' WHERE run_id = :run")
        await connection.execute(ended, {"run": run_id})
    assert (await sweep(loop))["rollouts_archived"] == 2
    async with loop.database.begin() as connection:
        turns = select(func.count()).select_from(TurnTable)
        mine = TurnTable.rollout_id.in_(select(RolloutTable.id).where(RolloutTable.group_id == group_id))
        assert (await connection.execute(turns.where(mine))).scalar_one() == 0
    assert sorted(path.name for path in (loop.stack.home / "archive" / run_id).iterdir())[-1] == "turn"
    assert (await sweep(loop))["rollouts_archived"] == 0
