"""Waited-for errors of Postgres: all that a healthy server would not give, and no fault of a statement."""

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from sqlalchemy import cast, func, literal, select, text, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import greenlet_spawn

from ratchet.errors import StoreUnavailableError
from store.database import Database, async_url, libpq_url
from store.schema import RunTable
from tests.integration.training.records import make_config, make_run

STATES = sorted(
    {
        str(error.sqlstate)
        for _, error in inspect.getmembers(asyncpg.exceptions, inspect.isclass)
        if getattr(error, "sqlstate", None) and not str(error.sqlstate).startswith(("00", "01", "02"))
    }
)
"""Every SQLSTATE that the driver knows, without success and warnings."""


MENDED_BY_MIGRATION_OR_GRANT = {"42501", "42P01", "42703", "42704", "42883", "42P05", "42P10"}


def is_statements_fault(state: str) -> bool:
    return state[:2] in ("22", "23", "42") and state not in MENDED_BY_MIGRATION_OR_GRANT


async def test_every_error_of_the_server_is_sorted(database: Database) -> None:
    assert len(STATES) > 200
    wrong = []
    for state in STATES:
        statement = text(f"DO $$ BEGIN RAISE EXCEPTION 'raised by a test' USING ERRCODE = '{state}'; END $$")
        try:
            async with database.begin() as connection:
                await connection.execute(statement)
        except StoreUnavailableError as error:
            if is_statements_fault(state) or "raised by a test" not in str(error):
                wrong.append((state, str(error)))
        except DBAPIError as error:
            if not is_statements_fault(state):
                wrong.append((state, str(error)))
    assert not wrong


@pytest.mark.parametrize("certificate", [None, "no certificate"])
async def test_a_certificate_that_is_missing_for_a_while_is_waited_for(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: str | None
) -> None:
    """A tool that renews certificates replaces their files while processes run."""
    file = tmp_path / "root.crt"
    file.write_text("renewed soon")
    monkeypatch.setenv("PGSSLROOTCERT", str(file))
    async with Database(f"{postgres_url}?sslmode=verify-full") as database:
        file.unlink()
        if certificate is not None:
            file.write_text(certificate)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                async with database.begin():
                    pass
            with pytest.raises(StoreUnavailableError):
                await database.fetch("SELECT 1")


REFUSED = "binary \0 and \udcff"
STORED = "binary \\0 and \\udcff"


async def test_every_text_of_a_statement_is_stored(database: Database, run_id: str) -> None:
    """An error's output may contain characters that Postgres refuses; no writer of a column has to know it."""
    await make_run(database, run_id, make_config())
    row = RunTable.run_id == run_id
    async with database.begin() as connection:
        values = {"state_reason": REFUSED, "config": {REFUSED: [REFUSED, {"a": REFUSED}]}, "box_cap_cause": "é"}
        await connection.execute(update(RunTable).where(row).values(**values))
        stored = (await connection.execute(select(*(getattr(RunTable, name) for name in values)).where(row))).one()
        assert stored == (STORED, {STORED: [STORED, {"a": STORED}]}, "é")
        same = select(RunTable.run_id).where(row, RunTable.state_reason == REFUSED, RunTable.config.has_key(REFUSED))
        assert (await connection.execute(same)).scalar_one() == run_id
        assert (await connection.execute(select(func.lower(literal(REFUSED))))).scalar_one() == STORED
        merged = RunTable.config.op("||")(cast({"b": REFUSED}, JSONB))
        await connection.execute(update(RunTable).where(row).values(config=merged))
        assert (await connection.execute(select(RunTable.config["b"].astext).where(row))).scalar_one() == STORED
    statement = "SELECT $1::text, $2::varchar, $3::text[], $4::bigint[]"
    found = await database.fetch(statement, REFUSED, REFUSED, [REFUSED, None], [1])
    assert [tuple(one.values()) for one in found] == [(STORED, STORED, [STORED, None], [1])]


async def test_a_server_that_has_become_read_only_is_waited_for(database: Database) -> None:
    with pytest.raises(StoreUnavailableError, match="read-only"):
        async with database.begin() as connection:
            await connection.execute(text("SET TRANSACTION READ ONLY"))
            await connection.execute(update(RunTable).values(state_reason="x"))


async def test_a_schema_older_than_the_program_is_waited_for(database: Database) -> None:
    with pytest.raises(StoreUnavailableError, match="no_such_column"):
        async with database.begin() as connection:
            await connection.execute(text("SELECT no_such_column FROM run"))


async def test_a_connection_that_the_server_ends_is_waited_for(database: Database) -> None:
    with pytest.raises(StoreUnavailableError):
        async with database.begin() as connection:
            await connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    async with database.begin() as connection:
        assert (await connection.execute(text("SELECT 1"))).scalar_one() == 1


@pytest.mark.parametrize("value", [2**40, object()])
async def test_a_value_that_cannot_be_sent_is_a_bug(database: Database, value: object) -> None:
    with pytest.raises(DBAPIError):
        async with database.begin() as connection:
            await connection.execute(update(RunTable).values(step=value))


async def test_an_error_of_the_callers_own_is_left_alone(database: Database) -> None:
    with pytest.raises(FileNotFoundError):
        async with database.begin():
            Path("/no/such/file").read_text()


@asynccontextmanager
async def silenceable_proxy(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield the address of a proxy to Postgres, and an event after which no byte passes any more on connections that
    were there, also if it is cleared for new ones."""
    parts = urlsplit(url)
    silent = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fallen_silent = asyncio.create_task(silent.wait())
        while data := await reader.read(65536):
            if fallen_silent.done():
                await asyncio.Event().wait()
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(parts.hostname, parts.port)
        writers.extend([writer, back])
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    netloc = parts.netloc.rpartition("@")[0] + f"@127.0.0.1:{port}"
    try:
        yield urlunsplit(parts._replace(netloc=netloc)), silent
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def test_an_idle_connection_that_the_server_has_ended_is_replaced(postgres_url: str) -> None:
    """As after a restart of the server: no caller sees it."""
    async with Database(postgres_url) as database, Database(postgres_url) as other:

        async def ask(connection: AsyncConnection) -> int:
            return int((await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one())

        uses = (partial(database.run, ask), partial(database.read, ask), partial(database.fetch, "SELECT 1"))
        for use in uses:
            backend = await database.run(ask)
            pooled = await database.engine.raw_connection()
            driver = pooled.driver_connection
            assert driver is not None and driver.get_server_pid() == backend
            await greenlet_spawn(pooled.close)
            await other.fetch("SELECT pg_terminate_backend($1)", backend)
            async with asyncio.timeout(20):
                while not driver.is_closed():
                    await asyncio.sleep(0.05)
            await use()
            assert await database.run(ask) != backend


async def test_reads_are_one_message_each_and_see_each_others_commits(database: Database) -> None:
    async def began(connection: AsyncConnection) -> list[datetime]:
        return [(await connection.execute(text("SELECT now()"))).scalar_one() for _ in range(2)]

    assert len(set(await database.run(began))) == 1  # of one transaction
    assert len(set(await database.read(began))) == 2


async def test_the_tests_notice_a_read_that_writes(database: Database) -> None:
    async def lock(connection: AsyncConnection) -> None:
        await connection.execute(select(RunTable.run_id).with_for_update())

    await database.run(lock)
    with pytest.raises(AssertionError, match="FOR UPDATE"):
        await database.read(lock)


async def test_a_server_that_falls_silent_is_given_up_in_time(postgres_url: str) -> None:
    """Also in the middle of a transaction: neither the statement nor the rollback may wait for the network's limits."""
    async with (
        silenceable_proxy(postgres_url) as (url, silent),
        Database(url, pool_size=1, statement_seconds=1) as database,
    ):
        with pytest.raises(StoreUnavailableError):
            async with asyncio.timeout(100), database.begin() as connection:
                await connection.execute(text("SELECT 1"))
                silent.set()
                await connection.execute(text("SELECT 2"))
        with pytest.raises(StoreUnavailableError):  # the pool's next connection cannot be opened either
            async with asyncio.timeout(100), database.begin() as connection:
                await connection.execute(text("SELECT 3"))


async def test_one_silent_connection_is_paid_for_once(postgres_url: str) -> None:
    """The idle connections of a pool fall silent together, with the host or the way to it; new ones work."""
    async with (
        silenceable_proxy(postgres_url) as (url, silent),
        Database(url, pool_size=3, statement_seconds=4) as database,
    ):

        async def ask() -> None:
            async with database.begin() as connection:
                await connection.execute(text("SELECT pg_sleep(0.2)"))

        for use in (ask, lambda: database.fetch("SELECT 1")):
            await asyncio.gather(*(ask() for _ in range(6)))
            silent.set()
            with pytest.raises(StoreUnavailableError):
                await use()
            silent.clear()
            for _ in range(6):
                await ask()


async def test_a_process_that_falls_silent_in_a_transaction_loses_its_locks(postgres_url: str) -> None:
    """As one that is suspended or cut off; its next statement fails as if Postgres had been away."""
    async with Database(postgres_url, pool_size=1, idle_seconds=1) as silent, Database(postgres_url) as other:
        lock = text("SELECT pg_advisory_xact_lock(20261124)")
        with pytest.raises(StoreUnavailableError):
            async with silent.begin() as connection:
                await connection.execute(lock)
                async with asyncio.timeout(20), other.begin() as waiting:
                    await waiting.execute(lock)
                await connection.execute(text("SELECT 1"))
        async with silent.begin() as connection:
            await connection.execute(text("SELECT 1"))


async def test_the_server_ends_a_statement_of_a_process_that_is_killed(postgres_url: str) -> None:
    program = """
import asyncio, sys
from sqlalchemy import text
from store.database import Database
async def run():
    async with Database(sys.argv[1], statement_seconds=1).begin() as connection:
        await connection.execute(text("SELECT pg_sleep(3600) AS of_a_killed_process"))
asyncio.run(run())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, postgres_url)
    async with Database(postgres_url) as database, asyncio.timeout(60):
        while not await _num_sleeping(database):
            await asyncio.sleep(0.05)
        process.kill()
        await process.wait()
        while await _num_sleeping(database):
            await asyncio.sleep(0.2)


async def _num_sleeping(database: Database) -> int:
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(3600)%' AND state = 'active'"
    async with database.begin() as connection:
        return int((await connection.execute(text(sleeping))).scalar_one())


async def test_a_statement_of_its_own_is_committed_and_leaves_no_transaction(postgres_url: str) -> None:
    async with Database(postgres_url, pool_size=1) as database, Database(postgres_url) as other:
        ((pid,),) = await database.fetch("SELECT pg_backend_pid() FROM set_config('application_name', $1, false)", "x")
        ((state, name),) = await other.fetch("SELECT state, application_name FROM pg_stat_activity WHERE pid = $1", pid)
        assert (state, name) == ("idle", "x")


async def test_errors_of_a_statement_of_its_own_are_sorted_as_those_of_a_transaction(database: Database) -> None:
    with pytest.raises(asyncpg.DivisionByZeroError):
        await database.fetch("SELECT 1 / $1::int", 0)
    with pytest.raises(asyncpg.DataError):
        await database.fetch("SELECT $1::int", 2**40)
    with pytest.raises(StoreUnavailableError, match="no_such_column"):
        await database.fetch("SELECT no_such_column FROM run")
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await database.fetch("SELECT pg_terminate_backend(pg_backend_pid())")
        assert [tuple(row) for row in await database.fetch("SELECT 1")] == [(1,)]


async def test_a_cancelled_statement_of_its_own_ends_and_its_connection_is_not_used_again(postgres_url: str) -> None:
    async with Database(postgres_url, pool_size=1) as database, Database(postgres_url) as other, asyncio.timeout(60):
        for _ in range(3):  # more than the pool has
            asked = asyncio.create_task(database.fetch("SELECT pg_sleep(3600) AS of_a_killed_process"))
            while not await _num_sleeping(other):
                await asyncio.sleep(0.05)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert [tuple(row) for row in await database.fetch("SELECT 1")] == [(1,)]
            while await _num_sleeping(other):
                await asyncio.sleep(0.05)


def test_the_name_that_services_give_to_tls_is_the_drivers() -> None:
    assert (
        async_url("postgres://a:b@h:1/d?timeout=1&sslmode=require")
        == "postgresql+asyncpg://a:b@h:1/d?timeout=1&ssl=require"
    )
    for name in ("ssl", "sslmode"):
        for scheme in ("postgres", "postgresql", "postgresql+asyncpg"):
            assert libpq_url(f"{scheme}://a:b@h/d?{name}=require") == "postgresql://a:b@h/d?sslmode=require"
