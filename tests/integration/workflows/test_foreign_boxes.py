"""No box is ended that is not this installation's: its service may list others, and its store may be a copy.

The service is a stand-in without boxes; the store, its copies and Temporal are real.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select, text, update
from temporalio.testing import ActivityEnvironment

from activities.box_lifecycle import INSTALLATION_KEY, UUID_KEY, BoxCreator, kill_and_record, try_kill_box
from activities.sweep import SweepActivities
from ratchet.sweep_payloads import SweepInput, SweepResult
from ratchet.types import SandboxRole
from stack import backup
from stack.temporal_namespace import prepare_namespace
from store import installations, sandboxes
from store.database import Database
from store.sandboxes import LedgerRow, NewSandbox
from store.schema import InstallationTable, SandboxTable
from tests.integration.workflows.conftest import Loop
from tests.standins.foreign_boxes import (
    DEVIATIONS,
    FEW_FIELDS,
    IGNORES_FILTER,
    NO_METADATA,
    ForeignBoxes,
    serving_foreign_boxes,
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def service() -> Iterator[ForeignBoxes]:
    with serving_foreign_boxes() as found:
        yield found


async def own_id(database: Database) -> UUID:
    async with database.begin() as connection:
        return await installations.installation_id(connection)


async def sweep(loop: Loop, database: Database, service: ForeignBoxes, dry_run: bool = False) -> SweepResult:
    activities = SweepActivities(database, service.provider(), loop.settings, loop.client)
    return await ActivityEnvironment().run(activities.sweep, SweepInput(force=True, dry_run=dry_run))


async def reserve(database: Database) -> LedgerRow:
    new = NewSandbox("e2b", SandboxRole.GRADE, None, 1, f"admit/{uuid4()}", "host")
    async with database.begin() as connection:
        row = await sandboxes.reserve_sandbox(connection, new, max_boxes=99, max_boots=99)
    assert row is not None
    return row


async def boot(database: Database, service: ForeignBoxes, row: LedgerRow | None = None) -> LedgerRow:
    """Create a box as a boot does; return its row."""
    row = row or await reserve(database)
    await BoxCreator(database, service.provider()).create(row, "host", ttl_seconds=60, network=False)
    return await row_of(database, row.id)


async def row_of(database: Database, sandbox_id: int) -> Any:
    async with database.begin() as connection:
        return (await connection.execute(select(SandboxTable).where(SandboxTable.id == sandbox_id))).one()


async def want_release(database: Database, row: LedgerRow) -> None:
    async with database.begin() as connection:
        await sandboxes.want_sandbox_release(connection, row.id, "test")


@asynccontextmanager
async def copy_of(database: Database) -> AsyncIterator[Database]:
    """Dump the store and restore it into another database of the server, by hand."""
    url = f"{database.url.rpartition('/')[0]}/copy_{uuid4().hex[:8]}"
    name = url.rpartition("/")[2]
    async with backup._administration(database.url) as administration:
        await administration.execute(text(f"CREATE DATABASE {name}"))
        dump = Path(f"/tmp/{name}.dump")
        try:
            await asyncio.to_thread(backup._run, "pg_dump", "--format=custom", f"--file={dump}", database.url)
            await asyncio.to_thread(backup._run, "pg_restore", f"--dbname={url}", str(dump))
            async with Database(url, pool_size=2) as copy:
                yield copy
        finally:
            dump.unlink(missing_ok=True)
            await administration.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


@asynccontextmanager
async def restored_from(database: Database, place: Path) -> AsyncIterator[Database]:
    url = f"{database.url.rpartition('/')[0]}/restored_{uuid4().hex[:8]}"
    await backup.make_backup(database, place / "home", place / "saved")
    await backup.restore_backup(url, place / "new", place / "saved")
    async with Database(url, pool_size=2) as copy:
        yield copy


# ---------------------------------------------------------------- what a service lists


@pytest.mark.parametrize("deviation", DEVIATIONS)
async def test_what_a_service_lists_is_not_taken_for_ours(loop: Loop, database: Database, deviation: str) -> None:
    with serving_foreign_boxes(deviation) as service:
        theirs = service.add({INSTALLATION_KEY: str(uuid4()), UUID_KEY: str(uuid4())})
        unmarked = service.add({"name": "by hand"})
        ours = service.add({INSTALLATION_KEY: str(await own_id(database)), UUID_KEY: str(uuid4())})
        result = await sweep(loop, database, service)
        assert {theirs, unmarked} <= service.boxes.keys()
        is_told = deviation in (IGNORES_FILTER, FEW_FIELDS)
        assert (service.killed, result.boxes_unknown) == (([ours], 1) if is_told else ([], 0))


async def test_a_dry_run_names_only_ours(loop: Loop, database: Database) -> None:
    with serving_foreign_boxes(IGNORES_FILTER) as service:
        theirs = service.add({INSTALLATION_KEY: str(uuid4())})
        ours = service.add({INSTALLATION_KEY: str(await own_id(database)), UUID_KEY: str(uuid4())})
        result = await sweep(loop, database, service, dry_run=True)
        assert ours in " ".join(result.boxes) and theirs not in " ".join(result.boxes)


@pytest.mark.parametrize("by", ["sweep", "its stage", "release"])
@pytest.mark.parametrize("owner", ["another installation", "another box of ours"])
async def test_an_id_that_the_service_has_given_to_another_box_is_not_killed(
    loop: Loop, database: Database, service: ForeignBoxes, by: str, owner: str
) -> None:
    row = await boot(database, service)
    installation = str(uuid4()) if owner == "another installation" else str(await own_id(database))
    service.boxes[row.provider_id] = {INSTALLATION_KEY: installation, UUID_KEY: str(uuid4())}
    await want_release(database, row)
    if by == "sweep":
        other = await boot(database, service)
        service.boxes[row.provider_id][UUID_KEY] = str(other.uuid)  # so that it is not an unknown box of ours
        async with database.begin() as connection:
            alive = update(SandboxTable).where(SandboxTable.id == other.id)
            await connection.execute(alive.values(workflow_id="the test", state="creating", created_at=text("now()")))
        await sweep_of(loop, database, service)
    elif by == "its stage":
        await try_kill_box(database, service.provider(), row.id, row.provider_id)
    else:
        await kill_and_record(database, service.provider(), [row])
    assert row.provider_id in service.boxes and row.provider_id not in service.killed
    assert (await row_of(database, row.id)).state == "released", "the row's own box is gone"


async def sweep_of(loop: Loop, database: Database, service: ForeignBoxes) -> SweepResult:
    """Sweep with a grace for boxes that are being created."""
    numbers = loop.settings.sweep.model_copy(update={"creating_grace": 3600})
    settings = loop.settings.model_copy(update={"sweep": numbers})
    activities = SweepActivities(database, service.provider(), settings, loop.client)
    return await ActivityEnvironment().run(activities.sweep, SweepInput(force=True))


async def test_a_box_whose_metadata_is_not_given_back_is_left_to_its_time_to_live(
    loop: Loop, database: Database
) -> None:
    with serving_foreign_boxes(NO_METADATA) as service:
        row = await boot(database, service)
        await want_release(database, row)
        await kill_and_record(database, service.provider(), [row])
        await sweep(loop, database, service)
        assert (service.killed, (await row_of(database, row.id)).state) == ([], "release_wanted")
        service.boxes.clear()  # its time is over
        await sweep(loop, database, service)
        assert (await row_of(database, row.id)).state == "released"


async def test_our_own_boxes_end_as_ever(loop: Loop, database: Database, service: ForeignBoxes) -> None:
    rows = [await boot(database, service) for _ in range(3)]
    await try_kill_box(database, service.provider(), rows[0].id, rows[0].provider_id)
    await want_release(database, rows[1])
    await kill_and_record(database, service.provider(), [rows[1]])
    await sweep(loop, database, service)
    assert service.killed == [row.provider_id for row in rows] and not service.boxes


# ---------------------------------------------------------------- copies of the store


@pytest.mark.parametrize("made_by", ["a dump", "`ratchet admin restore`"])
async def test_a_copy_of_the_store_ends_no_box_of_the_original(
    loop: Loop, database: Database, service: ForeignBoxes, made_by: str, tmp_path: Path
) -> None:
    live, created, wanted = [await boot(database, service) for _ in range(3)]
    await want_release(database, wanted)
    original = await own_id(database)
    async with copy_of(database) if made_by == "a dump" else restored_from(database, tmp_path) as copy:
        async with database.begin() as connection:  # what the original has done since
            later = service.add({INSTALLATION_KEY: str(original), UUID_KEY: str(uuid4())})
            await connection.execute(
                update(SandboxTable).where(SandboxTable.id == created.id).values(used_by="a stage of the original")
            )
        await sweep(loop, copy, service)
        assert service.killed == []
        assert {later, live.provider_id, created.provider_id, wanted.provider_id} == service.boxes.keys()
        left = await row_of(copy, live.id)
        assert left.state == "released" and str(original) in left.release_reason
        assert await own_id(copy) != original
    assert await own_id(database) == original


async def test_a_copys_own_boxes_are_its_own(loop: Loop, database: Database, service: ForeignBoxes) -> None:
    theirs = await boot(database, service)
    async with copy_of(database) as copy:
        own = await boot(copy, service)
        await sweep(loop, database, service)
        assert own.provider_id in service.boxes, "the original's sweep spares it"
        await sweep(loop, copy, service)
        assert service.killed == [theirs.provider_id, own.provider_id]


async def test_a_copy_does_not_adopt_the_box_that_the_original_is_creating(
    database: Database, service: ForeignBoxes
) -> None:
    """The row's uuid is in both ledgers, and the service gives the same box for the same key."""
    row = await reserve(database)
    async with copy_of(database) as copy:
        theirs = await boot(database, service, row)
        own = await boot(copy, service, row)
        assert own.provider_id != theirs.provider_id


async def test_a_person_who_has_moved_the_store_keeps_its_id_and_its_boxes(
    loop: Loop, database: Database, service: ForeignBoxes
) -> None:
    original, before = await own_id(database), await boot(database, service)
    settings = loop.settings.model_copy(update={"installation": f"moved{uuid4().hex[:6]}"})
    async with copy_of(database) as moved:
        interim = await boot(moved, service)
        await prepare_namespace(loop.client, moved, settings, is_own=True, moved=True)
        assert await own_id(moved) == original
        after = await boot(moved, service)
        await sweep(loop, moved, service)
        assert set(service.killed) == {before.provider_id, interim.provider_id, after.provider_id}


async def test_who_says_that_it_is_a_copy_is_not_asked_again(loop: Loop, database: Database) -> None:
    original = await own_id(database)
    settings = loop.settings.model_copy(update={"installation": f"copied{uuid4().hex[:6]}"})
    async with copy_of(database) as copy:
        await prepare_namespace(loop.client, copy, settings, is_own=True, moved=False)
        own = await own_id(copy)
        async with copy.begin() as connection:
            assert (await installations.installation(connection)).copied_from == ()
        await prepare_namespace(loop.client, copy, settings, is_own=True)
        assert original != own == await own_id(copy)


async def test_many_processes_of_a_copy_agree_on_its_id(database: Database) -> None:
    await own_id(database)
    async with copy_of(database) as copy:
        assert len(set(await asyncio.gather(*(own_id(copy) for _ in range(8))))) == 1


async def test_a_copy_of_a_copy(database: Database) -> None:
    ids = [await own_id(database)]
    async with copy_of(database) as first:
        ids.append(await own_id(first))
        async with copy_of(first) as second:
            ids.append(await own_id(second))
    assert len(set(ids)) == 3


async def test_a_store_that_stays_keeps_its_id(database: Database) -> None:
    original = await own_id(database)
    await database.close()  # as after a restart or a failover
    async with Database(database.url, pool_size=1) as again:
        assert await own_id(again) == original
        async with again.begin() as connection:
            row = (await connection.execute(select(InstallationTable))).one()
    assert (row.copied_from, row.moved_from) == ([], [])
