"""Versions at an address reach an engine's node while the engine serves, and its row says what is waited for."""

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from sqlalchemy import insert

from engine import adapter_files, policy_fetcher, weight_storage
from engine.policy_fetcher import PolicyFetcher
from engine.policy_files import describe_files, weight_files
from ratchet.background_task import running_beside
from ratchet.types import JsonObject, policy_version
from stack.parts import Stack
from stack.run_status import diagnose
from store import engines
from store.database import Database
from store.engines import EngineRow
from store.schema import PolicyVersionTable
from tests.integration.training.records import make_config, make_run
from tests.s3_storage import S3Storage
from tests.standins.failing_database import FailingDatabase

WEIGHTS = "model.safetensors"
PATIENCE_SECONDS = 120.0


class Node:
    """An engine's node, and a learner on another one that shares nothing but the storage of weights."""

    def __init__(self, database: Database, run_id: str, home: Path, address: str) -> None:
        self.database = database
        self.run_id = run_id
        self.learner = home / "learner"
        self.root = home / "node" / "policies"
        self.address = address
        self.fetcher = PolicyFetcher(database, self.root)

    async def register(self) -> None:
        async with self.database.begin() as connection:
            self.fetcher.engine_id = await engines.register_engine(connection, "http://127.0.0.1:1", "", {})

    async def row(self) -> EngineRow:
        async with self.database.begin() as connection:
            row = await engines.get_engine(connection, self.fetcher.engine_id)
        assert row is not None
        return row

    async def row_with(self, condition: Callable[[EngineRow], object]) -> EngineRow:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(row := await self.row()):
                await asyncio.sleep(0.05)
        return row

    def write(self, step: int) -> Path:
        directory = self.learner / policy_version(self.run_id, step, 1)
        directory.mkdir(parents=True)
        (directory / WEIGHTS).write_bytes(b"weights %d" % step)
        (directory / "config.json").write_text("{}")
        return directory

    def write_adapter(self, step: int, base: Path) -> Path:
        directory = self.learner / policy_version(self.run_id, step, 1)
        directory.mkdir(parents=True)
        (directory / adapter_files.WEIGHTS).write_bytes(b"adapter %d" % step)
        (directory / adapter_files.CONFIG).write_text('{"r": 8}')
        adapter_files.write_base(base, weight_files(describe_files(base)), directory, directory)
        return directory

    async def publish(self, directory: Path, is_stored: bool = True) -> str:
        """Store the version and record it. Without `is_stored` the files are gone before an engine can fetch them."""
        version = f"{self.run_id}/{directory.name}"
        uri, files = weight_storage.version_address(self.address, version), describe_files(directory)
        if is_stored:
            await asyncio.to_thread(weight_storage.upload_version, directory, uri, files)
        row: JsonObject = {"version": version, "run_id": self.run_id, "epoch": 1, "uri": uri, "files": files}
        async with self.database.begin() as connection:
            values = row | {"step": int(directory.name.partition(".")[0])}
            await connection.execute(insert(PolicyVersionTable).values(**values))
        return version

    @contextlib.asynccontextmanager
    async def fetching(self) -> AsyncIterator[None]:
        async with running_beside(self.fetcher.keep_fetching()):
            yield


@pytest.fixture
async def node(database: Database, run_id: str, tmp_path: Path) -> Node:
    await make_run(database, run_id, make_config())
    node = Node(database, run_id, tmp_path, f"file://{tmp_path}/stored")
    await node.register()
    return node


async def test_each_new_version_is_fetched_and_the_engines_row_says_so(node: Node) -> None:
    first = await node.publish(node.write(1))
    async with node.fetching():
        await node.row_with(lambda row: row.has_fetched(first))
        second = await node.publish(node.write(2))
        row = await node.row_with(lambda row: row.has_fetched(second))
    assert row.has_fetched(first) and row.fetch_error is None
    assert (node.root / second / WEIGHTS).read_bytes() == b"weights 2"


async def test_versions_are_fetched_after_any_error(
    node: Node, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the report ended the loop before: the engine went on with old weights for its whole life."""
    monkeypatch.setattr(policy_fetcher, "_LONGEST_WAIT_SECONDS", 0.05)
    version = await node.publish(node.write(1))
    async with FailingDatabase(postgres_url) as failing:
        failing.num_failures = 4
        node.fetcher.database = failing
        async with node.fetching():
            row = await node.row_with(lambda row: row.has_fetched(version))
    assert row.fetch_error is None and failing.num_failures == 0


async def test_an_outage_is_waited_for_and_said(
    node: Node, s3: S3Storage, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.address = f"{s3.make_bucket(f'weights-{uuid.uuid4().hex[:8]}')}/runs"
    version = await node.publish(node.write(1))
    s3.link.cut()
    try:
        async with node.fetching():
            row = await node.row_with(lambda row: row.fetch_error)
            assert version in str(row.fetch_error) and not row.has_fetched(version)
            monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
            said = (await diagnose(Stack(tmp_path), node.run_id)).engines
            assert [f"waits for newer weights: {row.fetch_error}" in line for line in said] == [True]
            starting = asyncio.create_task(node.fetcher.newest_intact(None))  # another engine's start would wait, too
            s3.link.mend()
            row = await node.row_with(lambda row: row.has_fetched(version))
            assert row.fetch_error is None
            async with asyncio.timeout(PATIENCE_SECONDS):
                newest = await starting
    finally:
        s3.link.mend()
    assert newest is not None and newest.version == version


async def test_an_engine_starts_from_an_older_version_if_the_newest_stays_damaged(node: Node) -> None:
    older = await node.publish(node.write(1))
    newest = node.write(2)
    await node.publish(newest)
    stored = Path(node.address.removeprefix("file://")) / node.run_id / newest.name
    (stored / WEIGHTS).write_bytes(b"weights 3")
    async with asyncio.timeout(PATIENCE_SECONDS):
        found = await node.fetcher.newest_intact(None)
    assert found is not None and found.version == older
    async with node.fetching():
        row = await node.row_with(lambda row: row.fetch_error)
    assert "has sha256" in str(row.fetch_error) and row.has_fetched(older)


async def test_an_engine_does_not_start_without_files_that_may_come_back(node: Node) -> None:
    """A wrong bucket of this host looks like deleted files. The initial weights under no label would be wrong."""
    directory = node.write(1)
    version = await node.publish(directory, is_stored=False)
    starting = asyncio.create_task(node.fetcher.newest_intact(None))
    await node.row_with(lambda row: "FileNotFoundError" in str(row.fetch_error))
    assert not starting.done()
    weight_storage.upload_version(
        directory, weight_storage.version_address(node.address, version), describe_files(directory)
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        found = await starting
    assert found is not None and found.version == version


async def test_an_adapter_comes_with_its_whole_base(node: Node) -> None:
    base = node.write(0)
    await node.publish(base)
    adapter = await node.publish(node.write_adapter(1, base))
    shutil.rmtree(node.learner)
    async with asyncio.timeout(PATIENCE_SECONDS):
        found = await node.fetcher.newest_intact(None)
    assert found is not None and found.version == adapter
    there = adapter_files.read_base(node.root / adapter).directory
    assert there == (node.root / node.run_id / base.name).resolve()
    assert sorted(path.name for path in there.iterdir()) == ["config.json", WEIGHTS]


async def test_a_copy_that_has_changed_on_the_disk_is_fetched_again(node: Node) -> None:
    version = await node.publish(node.write(1))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await node.fetcher.newest_intact(None)
        (node.root / version / WEIGHTS).write_bytes(b"weights 0")
        found = await node.fetcher.newest_intact(None)
    assert found is not None and found.version == version
    assert (node.root / version / WEIGHTS).read_bytes() == b"weights 1"


async def test_after_an_abandoned_pause_a_version_that_is_here_is_enough(node: Node) -> None:
    """The engine is paused, so nothing is fetched. `learn.sync` brings the newest version later."""
    here = await node.publish(node.write(1))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await node.fetcher.newest_intact(None)
        await node.publish(node.write(2), is_stored=False)
        found = await node.fetcher.newest_intact(None, only_here=True)
    assert found is not None and found.version == here
