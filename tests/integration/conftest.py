"""One real Postgres for all integration tests of a session, an empty store for each test, and fresh boxes."""

import re
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

from stack.ports import free_port
from stack.postgres import database_url, embedded_server, initialise
from store.database import Database
from store.migration import migrate
from store.schema import Base
from tests.integration.boxes import box, box_gateway, fresh_box, second_box
from tests.integration.ratchet_command import ratchet
from tests.s3_storage import S3Storage, s3_storage

__all__ = ["box", "box_gateway", "fresh_box", "ratchet", "second_box"]

WITHOUT_FLUSHES = "fsync = off\nfull_page_writes = off\nsynchronous_commit = off\n"
"""A commit waits for no disk, about 5 ms each: the server may be killed, but the machine does not fail."""
# TRUNCATE makes new files for every table and index, and takes over ten times as long. Ids begin at 1 again.
EMPTY = f"""DO $$ BEGIN
SET LOCAL session_replication_role = replica;
{"".join(f'DELETE FROM "{table.name}";' for table in Base.metadata.sorted_tables)}
PERFORM setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S';
END $$"""


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a new server with the tables of the schema.

    Its data directory is outside pytest's base directory, because another pytest session clears that one while the
    server runs.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ratchet-postgres-", ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)  # the embedded server runs as another user
        data = Path(directory) / "data"
        initialise(data)
        with (data / "postgresql.conf").open("a") as settings:
            settings.write(WITHOUT_FLUSHES)
        with embedded_server(data, port):
            migrate(database_url(port))  # adapters and other processes wait for the schema's revision
            yield database_url(port)


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    """A connection pool on the shared server, with every table empty, whose `read` refuses to write or lock."""
    database = Database(postgres_url)

    @event.listens_for(database.engine.sync_engine, "before_cursor_execute")
    def only_read(connection: Connection, _: object, statement: str, *__: object) -> None:
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            assert not re.search(r"\b(INSERT|UPDATE|DELETE|FOR SHARE|FOR NO KEY)\b|advisory", statement), statement

    async with database.begin() as connection:
        await connection.exec_driver_sql(EMPTY)
    yield database
    await database.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Storage]:
    """An S3 server; the environment of this process and of those that it starts names it."""
    with s3_storage() as storage:
        yield storage


@pytest.fixture
def run_id() -> str:
    """An id for a run of this test's own."""
    return f"test-{uuid.uuid4().hex[:8]}"
