"""Two installations on one Temporal namespace: they are kept apart by name, or the second is refused."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle

from ratchet.errors import MachineError
from ratchet.temporal_settings import load_temporal_settings
from stack.temporal_namespace import prepare_namespace, require_own_namespace
from store import installations, runs
from store.database import Database, async_url
from store.migration import migrate
from tests.integration.workflows.conftest import Loop

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
async def other(loop: Loop) -> AsyncIterator[Database]:
    """Return the empty, migrated store of another installation."""
    name = f"other_{uuid4().hex[:8]}"
    engine = create_async_engine(async_url(loop.database.url), isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {name}"))
        url = loop.database.url.rpartition("/")[0] + f"/{name}"
        await asyncio.to_thread(migrate, url)
        async with Database(url, pool_size=1) as database:
            yield database
        await connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    await engine.dispose()


async def test_a_second_installation_under_the_same_names_is_refused(loop: Loop, other: Database) -> None:
    with pytest.raises(MachineError, match="RATCHET_INSTALLATION"):
        await prepare_namespace(loop.client, other, loop.settings, is_own=True)
    async with other.begin() as connection:
        row = await installations.stored_installation(connection)
        assert row is not None and row.namespace_id is None, "its workers go on waiting"


async def test_a_deleted_row_of_the_installation_is_named_with_its_remedy(loop: Loop, other: Database) -> None:
    settings = loop.settings.model_copy(update={"installation": f"deleted{uuid4().hex[:6]}"})
    await prepare_namespace(loop.client, other, settings, is_own=True)
    async with other.begin() as connection:
        before = await installations.installation_id(connection)
    for by in (require_own_namespace, prepare_namespace):  # `ratchet doctor`, `ratchet up`
        async with other.begin() as connection:
            await connection.execute(text("DELETE FROM installation"))
        with pytest.raises(MachineError, match="whose row was deleted, run `ratchet up --moved`"):
            await by(loop.client, other, settings, is_own=True)
        await prepare_namespace(loop.client, other, settings, is_own=True, moved=True)
        async with other.begin() as connection:
            assert await installations.installation_id(connection) == before
        await by(loop.client, other, settings, is_own=True)


async def test_a_store_whose_workflows_are_elsewhere_is_refused(loop: Loop, other: Database) -> None:
    settings = loop.settings.model_copy(update={"installation": "elsewhere"})
    await prepare_namespace(loop.client, other, settings, is_own=False)
    async with other.begin() as connection:
        await installations.set_installation_namespace(connection, "the id of another namespace")
    with pytest.raises(MachineError, match="the id of another namespace"):
        await prepare_namespace(loop.client, other, settings, is_own=False)
    await prepare_namespace(loop.client, other, settings, is_own=True)  # our own server has lost its data
    for moved in (True, False):  # what a person answers
        async with other.begin() as connection:
            before = await installations.installation_id(connection)
            await installations.set_installation_namespace(connection, "the id of another namespace")
        named = settings.model_copy(update={"installation": f"answered{moved}".lower()})
        await prepare_namespace(loop.client, other, named, is_own=False, moved=moved)
        async with other.begin() as connection:
            assert (await installations.installation_id(connection) == before) is moved


async def test_a_copy_in_the_namespace_of_its_original_is_refused(loop: Loop, other: Database) -> None:
    """As one is that was restored by hand while the original works on the same server."""
    settings = loop.settings.model_copy(update={"installation": f"origin{uuid4().hex[:6]}"})
    await prepare_namespace(loop.client, other, settings, is_own=False)
    async with other.begin() as connection:
        await connection.execute(text("UPDATE installation SET place = '7 16384'"))
    for moved in (None, False):
        with pytest.raises(MachineError, match=r"another installation .* RATCHET_INSTALLATION"):
            await prepare_namespace(loop.client, other, settings, is_own=False, moved=moved)
    await prepare_namespace(loop.client, other, settings, is_own=False, moved=True)


@pytest.mark.parametrize("moved", [None, False])
async def test_a_copy_that_has_the_servers_data_too_takes_the_schedule_over(
    loop: Loop, other: Database, moved: bool | None
) -> None:
    """As a copied state directory has: nothing but the place tells it from its original."""
    settings = loop.settings.model_copy(update={"installation": f"copied{uuid4().hex[:6]}"})
    await prepare_namespace(loop.client, other, settings, is_own=True)
    async with other.begin() as connection:
        before = await installations.installation_id(connection)
        await connection.execute(text("UPDATE installation SET place = '7 16384 /elsewhere/postgres'"))
    await prepare_namespace(loop.client, other, settings, is_own=True, moved=moved)
    await prepare_namespace(loop.client, other, settings, is_own=True)
    async with other.begin() as connection:
        assert await installations.installation_id(connection) != before
    if moved is None:
        await prepare_namespace(loop.client, other, settings, is_own=True, moved=True)
        await prepare_namespace(loop.client, other, settings, is_own=True)
        async with other.begin() as connection:
            assert await installations.installation_id(connection) == before


async def test_a_database_of_others_beside_a_new_server_of_our_own_is_a_copy(loop: Loop, other: Database) -> None:
    """As a snapshot of a managed database: its place is that of the original, and the workflows are not here."""
    settings = loop.settings.model_copy(update={"installation": f"snapshot{uuid4().hex[:6]}"})
    async with other.begin() as connection:  # other servers do not say where they are
        await connection.execute(text(f"ALTER DATABASE {other.url.rpartition('/')[2]} SET ratchet.place = ''"))
    async with Database(other.url, pool_size=1) as snapshot:
        await prepare_namespace(loop.client, snapshot, settings, is_own=True)
        async with snapshot.begin() as connection:
            before = await installations.installation_id(connection)
            await installations.set_installation_namespace(connection, "the id of the original's namespace")
        settings = settings.model_copy(update={"installation": f"snapshot{uuid4().hex[:6]}"})
        await prepare_namespace(loop.client, snapshot, settings, is_own=True)
        async with snapshot.begin() as connection:
            found = await installations.installation(connection)
        assert found.uuid != before and found.copied_from == (str(before),)


async def test_two_installations_with_names_of_their_own_do_not_meet(
    loop: Loop, other: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have workers on the same namespace; what is started on one stays there."""
    name = f"b{uuid4().hex[:6]}"
    monkeypatch.setenv("RATCHET_TEMPORAL_CONFIG", str(loop.home / "temporal.yaml"))
    monkeypatch.setenv("RATCHET_INSTALLATION", name)
    settings = load_temporal_settings()
    await prepare_namespace(loop.client, other, settings, is_own=True)
    second = replace(
        loop,
        environment=loop.environment | {"RATCHET_DATABASE_URL": other.url, "RATCHET_INSTALLATION": name},
        processes={},
    )
    part = f"worker-{name}"
    second.spawn(part, "cli.main", "part", "worker")
    try:
        for _ in range(4):  # a worker that polled the other's queue would take half of them
            run_id = f"{name}-{uuid4().hex[:8]}"
            config = {
                "model": str(loop.model),
                "datasets": [{"path": loop.dataset(eval_cmd="false")}],
                "grading": {"admission": "ignored"},
                "evaluation": {"at": []},
            }
            handle = await loop.client.start_workflow(
                "TrainRun", {"config": config}, id=f"run/{run_id}", task_queue=settings.own("control")
            )

            async def is_stored(run_id: str = run_id, handle: WorkflowHandle[Any, Any] = handle) -> bool:
                found = await handle.describe()
                assert found.status is WorkflowExecutionStatus.RUNNING
                async with (
                    other.begin() as connection
                ):  # a workflow that is cancelled earlier leaves its run to a sweep
                    return await runs.get_run(connection, run_id) is not None and found.history_length > 10

            await second.until(is_stored, "the run is in its own store", 60)
            async with loop.database.begin() as connection:
                assert await runs.get_run(connection, run_id) is None
            await handle.cancel()
            with pytest.raises(WorkflowFailureError):
                await second.result(handle, 240)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{second.last_words(part)}") from error
    finally:
        second.end(part)
