"""A backup holds the store and the files that it refers to; a restore makes a stack of it elsewhere, or nothing."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from sqlalchemy import func, insert, select, update
from typer.testing import CliRunner

from cli.main import app
from ratchet.errors import ConfigError, MachineError
from stack import backup
from stack.parts import Stack
from stack.ports import free_port
from stack.postgres import database_url, embedded_server
from store import installations
from store.database import Database
from store.migration import migrate
from store.schema import CheckpointTable, InstallationTable, PolicyVersionTable, RolloutTable, RunTable
from tests.free_ports import free_ports
from tests.integration.training.records import make_config, make_planned_run


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the embedded Postgres' user can read."""
    with tempfile.TemporaryDirectory(prefix="ratchet-backup-", ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
async def made(database: Database, model: Path, run_id: str, place: Path) -> Path:
    """The state directory of a run with a checkpoint, beside files that the store does not know."""
    home = place / "home"
    config = make_config(training={"steps": 2})
    shutil.copytree(model, home / "models" / "own")
    await make_planned_run(database, run_id, config, home / "models" / "own", home / "policies")
    checkpoint = home / "checkpoints" / run_id / "2.e1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "tensors").write_bytes(b"7" * 1000)
    (home / "logs").mkdir()
    (home / "archive" / run_id / "turn").mkdir(parents=True)
    (home / "archive" / run_id / "turn" / "0.parquet").write_bytes(b"rows")
    async with database.begin() as connection:
        deleted = {"run_id": run_id, "step": 1, "epoch": 1, "uri": str(checkpoint.parent / "1.e1")}
        await connection.execute(insert(CheckpointTable).values(**deleted, world_size=1, num_threads=1))
        row = {"run_id": run_id, "step": 2, "epoch": 1, "uri": str(checkpoint), "world_size": 1, "num_threads": 1}
        await connection.execute(insert(CheckpointTable).values(**row))
        await connection.execute(update(RunTable).values(checkpoint_uri=str(checkpoint), archived_to=1))
        await connection.execute(insert(InstallationTable).values(namespace_id="of the old server"))
    return home


def fresh_url(postgres_url: str) -> str:
    return postgres_url.rpartition("/")[0] + f"/restored_{uuid4().hex[:8]}"


async def test_a_restored_store_is_the_same_and_its_paths_lead_to_the_restored_files(
    database: Database, made: Path, place: Path, postgres_url: str, run_id: str
) -> None:
    manifest = await backup.make_backup(database, made, place / "saved")
    assert (manifest.runs, "logs" in manifest.files) == ([run_id], False)
    shutil.rmtree(made)
    new, url = place / "new", fresh_url(postgres_url)
    await backup.restore_backup(url, new, place / "saved")
    async with Database(url, pool_size=1) as restored:
        async with restored.begin() as there, database.begin() as here:
            for table in (RolloutTable, PolicyVersionTable, CheckpointTable):
                count = select(func.count()).select_from(table)
                assert (await there.execute(count)).scalar_one() == (await here.execute(count)).scalar_one() > 0
            row = (await there.execute(select(RunTable))).one()
            version = (await there.execute(select(PolicyVersionTable))).one()
            assert (await there.execute(select(InstallationTable.namespace_id))).scalar_one() is None
            original = (await here.execute(select(InstallationTable.uuid))).scalar_one()
            copy = await installations.installation(there)
            assert copy.uuid != original and copy.copied_from == (str(original),) and copy.copy_warning
        assert (Path(row.checkpoint_uri) / "tensors").read_bytes() == b"7" * 1000
        assert Path(row.checkpoint_uri).is_relative_to(new) and Path(row.model_path).is_relative_to(new)
        assert (new / "archive" / run_id / "turn" / "0.parquet").read_bytes() == b"rows"
        assert all((Path(version.uri) / file["name"]).is_file() for file in version.files)
        await asyncio.to_thread(migrate, url)


async def test_who_moves_a_store_by_a_backup_keeps_its_id(
    database: Database, made: Path, place: Path, postgres_url: str
) -> None:
    async with database.begin() as connection:
        original = await installations.installation_id(connection)
    await backup.make_backup(database, made, place / "saved")
    url = fresh_url(postgres_url)
    await backup.restore_backup(url, place / "new", place / "saved", moved=True)
    for _ in range(2):
        async with Database(url, pool_size=1) as restored, restored.begin() as connection:
            assert await installations.installation_id(connection) == original


def test_a_copied_directory_of_the_embedded_server_is_another_installation(place: Path) -> None:
    """Cluster and database have the same numbers in both; a restart at the same place changes nothing."""

    def id_at(home: Path) -> UUID:
        port = free_port()
        with embedded_server(home / "postgres", port):
            migrate(database_url(port))
            return asyncio.run(read_id(database_url(port)))

    async def read_id(url: str) -> UUID:
        async with Database(url, pool_size=1) as store, store.begin() as connection:
            return await installations.installation_id(connection)

    original = id_at(place / "home")
    shutil.copytree(place / "home", place / "copy")
    for path in ((place / "home"), *(place / "home").rglob("*")):
        copied = place / "copy" / path.relative_to(place / "home")
        os.chown(copied, path.stat().st_uid, path.stat().st_gid)
    assert id_at(place / "copy") != original == id_at(place / "home")


async def test_nothing_is_replaced(database: Database, made: Path, place: Path, postgres_url: str) -> None:
    await backup.make_backup(database, made, place / "saved")
    before = sorted(place.rglob("*"))
    with pytest.raises(ConfigError, match="exists already"):
        await backup.make_backup(database, made, place / "saved")
    with pytest.raises(ConfigError, match="is not empty, and a restore replaces nothing"):
        await backup.restore_backup(postgres_url, place / "new", place / "saved")
    assert sorted(place.rglob("*")) == before


async def test_what_is_interrupted_is_begun_again(
    database: Database, made: Path, place: Path, postgres_url: str
) -> None:
    (place / "saved.partial" / "files").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not a complete backup"):
        await backup.restore_backup(fresh_url(postgres_url), place / "new", place / "saved.partial")
    await backup.make_backup(database, made, place / "saved")
    assert not (place / "saved.partial").exists()
    url = fresh_url(postgres_url)
    kept = (place / "saved" / "store.dump").read_bytes()
    (place / "saved" / "store.dump").write_bytes(kept[: len(kept) // 2])
    with pytest.raises(Exception, match="pg_restore failed"):
        await backup.restore_backup(url, place / "new", place / "saved")
    (place / "saved" / "store.dump").write_bytes(kept)
    await backup.restore_backup(url, place / "new", place / "saved")


async def test_files_that_vanish_each_time_are_no_backup(database: Database, made: Path, place: Path) -> None:
    """As if a learner deleted an old checkpoint each time between the dump and the copy."""
    shutil.rmtree(made / "checkpoints")
    with pytest.raises(MachineError, match="files were deleted each of 3 times while they were copied; pause the runs"):
        await backup.make_backup(database, made, place / "saved")
    assert not (place / "saved").exists()


def test_the_commands_on_an_embedded_server(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RATCHET_DATABASE_URL", "TEMPORAL_ADDRESS"):
        monkeypatch.delenv(name, raising=False)

    def use(home: Path) -> Stack:
        home.mkdir()
        free_ports(home)
        monkeypatch.setenv("RATCHET_HOME", str(home))
        return Stack(home)

    stack = use(place / "old")
    with embedded_server(stack.home / "postgres", stack.ports["postgres"]):
        migrate(stack.environment()["RATCHET_DATABASE_URL"])
        saved = CliRunner().invoke(app, ["admin", "backup", str(place / "saved")])
        assert saved.exit_code == 0, saved.output
    stack = use(place / "new")
    restored = CliRunner().invoke(app, ["admin", "restore", str(place / "saved")], catch_exceptions=False)
    assert restored.exit_code == 0, restored.output
    assert "0 runs restored" in restored.output and "a new installation" in restored.output
    with pytest.raises(ConfigError, match="is not empty"):
        CliRunner().invoke(app, ["admin", "restore", str(place / "saved")], catch_exceptions=False)
