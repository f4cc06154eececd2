"""The room for boxes: boots that find none do not hold up those that would."""

import asyncio

from sqlalchemy import select, text

from ratchet.types import SandboxRole
from store import sandboxes
from store.database import Database
from store.sandboxes import LedgerRow, NewSandbox
from store.schema import RolloutTable
from tests.integration.training.records import make_config, make_group, make_run


async def reserve(database: Database, role: SandboxRole, max_boxes: int, max_boots: int = 100) -> LedgerRow | None:
    new = NewSandbox(provider="p", role=role, rollout_id=None, attempt=1, workflow_id="w", image="host")
    async with database.begin() as connection:
        return await sandboxes.reserve_sandbox(connection, new, max_boxes, max_boots)


async def test_a_boot_that_finds_no_room_does_not_wait_for_another_boot(database: Database) -> None:
    for _ in range(9):
        assert await reserve(database, SandboxRole.AGENT, max_boxes=10) is not None
    async with database.begin() as booting:
        await booting.execute(text("SELECT pg_advisory_xact_lock(hashtext('p'))"))
        async with asyncio.timeout(100):
            assert await reserve(database, SandboxRole.AGENT, max_boxes=10) is None
            assert await reserve(database, SandboxRole.GRADE, max_boxes=9) is None
            assert await reserve(database, SandboxRole.GRADE, max_boxes=10, max_boots=9) is None
    assert await reserve(database, SandboxRole.GRADE, max_boxes=10) is not None


async def test_many_boots_at_once_never_exceed_the_limit(database: Database) -> None:
    found = await asyncio.gather(*(reserve(database, SandboxRole.AGENT, max_boxes=6) for _ in range(40)))
    assert sum(row is not None for row in found) == 5, "a tenth, at least one, is reserved for grading"


async def test_who_holds_boxes(database: Database) -> None:
    for _ in range(3):
        assert await reserve(database, SandboxRole.AGENT, max_boxes=10) is not None
    async with database.begin() as connection:
        assert await sandboxes.box_holders(connection, "p") == [(None, 3)]
        assert await sandboxes.box_holders(connection, "another") == []


async def test_control_runs_side_by_side_have_boxes_of_their_own(database: Database, run_id: str) -> None:
    """A boot that is tried again adopts only the box of its own control run, and a release ends no other's."""
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        await make_group(connection, run_id, 0, [1.0])
        rollout_id = (
            await connection.execute(select(RolloutTable.id).where(RolloutTable.run_id == run_id))
        ).scalar_one()
        rows = {}
        for number in (None, 0, 1):
            new = NewSandbox("p", SandboxRole.GRADE, rollout_id, 1, "w", "host", control_number=number)
            rows[number] = await sandboxes.reserve_sandbox(connection, new, 10, 10)
        for number, row in rows.items():
            assert await sandboxes.unused_sandbox(connection, rollout_id, 1, SandboxRole.GRADE, "w", number) == row
        released = await sandboxes.want_release_of_rollout(connection, rollout_id, "lost", control_number=0)
        assert [row.id for row in released] == [rows[0].id]
        rest = await sandboxes.want_release_of_rollout(connection, rollout_id, "ended")
        assert {row.id for row in rest} == {row.id for row in rows.values()}
