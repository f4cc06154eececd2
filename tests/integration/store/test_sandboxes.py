"""The room for boxes: boots that find none do not hold up those that would."""

import asyncio

from sqlalchemy import text

from ratchet.types import SandboxRole
from store import sandboxes
from store.database import Database
from store.sandboxes import LedgerRow, NewSandbox


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
