"""A query of a person or a program cannot leave the role of a reader, by any function that it calls."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from client import Client
from client.read_only_sql import NoReaderError, read_sql_as_reader
from ratchet.errors import ConfigError, RatchetError
from reads.reader_role import READER_ROLE, READER_URL_VARIABLE, grant_reader_role
from store.database import Database

LEAVE = "set_config('role', 'none', true)"
INNER = "query_to_xml('{}', true, true, '')"


@pytest.fixture
async def granted(database: Database) -> Database:
    await grant_reader_role(database)
    return database


@pytest.fixture
def reads(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    yield Client(tmp_path)


@pytest.mark.parametrize(
    "attack",
    [
        f"SELECT {LEAVE}, " + INNER.format("select pg_read_file(''PG_VERSION'')"),
        f"SELECT {LEAVE}, " + INNER.format("select * from session_token"),
        f"SELECT {LEAVE}, " + INNER.format("select rolpassword from pg_authid"),
        f"SELECT {LEAVE}, set_config('session_authorization', 'postgres', true)",
        f"SELECT {LEAVE}, set_config('role', 'postgres', true)",
        f"SELECT {LEAVE}, set_config('transaction_read_only', 'off', true)",
        f"SELECT {LEAVE}, set_config('log_statement', 'none', true)",
        f"SELECT {LEAVE}, lo_import('/etc/hostname')",
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "COPY (SELECT 1) TO '/dev/null'",
        "DO $$ BEGIN RESET ROLE; COPY (SELECT 1) TO PROGRAM 'true'; END $$",
        "DO $$ BEGIN RESET SESSION AUTHORIZATION; RESET ROLE; PERFORM pg_ls_dir('.'); END $$",
        "DO $$ BEGIN SET SESSION AUTHORIZATION postgres; END $$",
        "DO $$ BEGIN RESET ROLE; COMMIT; DELETE FROM rollout; END $$",
    ],
)
async def test_a_query_cannot_leave_the_role(granted: Database, reads: Client, attack: str) -> None:
    with pytest.raises(ConfigError, match=r"denied|read-write mode|invalid transaction termination"):
        reads.sql(attack)


async def test_a_query_cannot_end_the_sessions_of_the_stack(granted: Database, reads: Client) -> None:
    async with granted.begin() as connection:
        pid = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        with pytest.raises(ConfigError, match="denied"):
            reads.sql(f"SELECT {LEAVE}, pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = {pid}")
        assert (await connection.execute(text("SELECT 1"))).scalar_one() == 1


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT 1 FROM rollouts", 'relation "rollouts" does not exist; did you mean rollout?'),
        ("SELECT rewrd FROM rollout", 'column "rewrd" does not exist; did you mean reward?'),
        ("SELECT r.rewrd FROM rollout r", "column r.rewrd does not exist; did you mean reward?"),
        ("SELECT 1 FROM zzz", 'relation "zzz" does not exist; `ratchet sql` lists the tables'),
    ],
)
async def test_a_name_that_is_not_there_is_told_with_the_nearest(
    granted: Database, reads: Client, query: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        reads.sql(query)
    assert str(refused.value) == f"Postgres refuses the query: {said}"


async def test_a_person_reads_without_a_readers_login(
    granted: Database, reads: Client, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reads.sql("SELECT session_user::text").rows == [(READER_ROLE,)]
    async with granted.begin() as connection:
        await connection.execute(text(f"ALTER ROLE {READER_ROLE} NOLOGIN"))
    with pytest.raises(NoReaderError, match=f"not permitted to log in.*{READER_URL_VARIABLE}"):
        await read_sql_as_reader(postgres_url, "SELECT 1")
    assert reads.sql("SELECT 1 AS one").rows == [(1,)]
    with pytest.raises(ConfigError, match="read-only"):
        reads.sql("DELETE FROM rollout")
    monkeypatch.setenv(READER_URL_VARIABLE, postgres_url)
    with pytest.raises(NoReaderError, match="may do more than a reader"):
        await read_sql_as_reader(postgres_url, "SELECT 1")
    monkeypatch.delenv(READER_URL_VARIABLE)
    async with granted.begin() as connection:
        await connection.execute(text(f"ALTER ROLE {READER_ROLE} LOGIN"))


async def test_the_login_of_another_role_is_used(
    granted: Database, reads: Client, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(READER_URL_VARIABLE, postgres_url.replace("postgres@", "own_reader@"))
    async with granted.begin() as connection:
        await connection.execute(text("CREATE ROLE own_reader LOGIN"))
        await connection.execute(text("GRANT SELECT ON rollout TO own_reader"))
    try:
        assert reads.sql("SELECT session_user::text, count(*) FROM rollout").rows == [("own_reader", 0)]
        async with granted.begin() as connection:
            await connection.execute(text("GRANT pg_read_all_data TO own_reader"))
        with pytest.raises(NoReaderError, match="may do more than a reader"):
            await read_sql_as_reader(postgres_url, "SELECT 1")
    finally:
        async with granted.begin() as connection:
            await connection.execute(text("DROP OWNED BY own_reader"))
            await connection.execute(text("DROP ROLE own_reader"))


def test_reading_makes_no_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", "postgresql://nobody@127.0.0.1:9/none")
    reads = Client(tmp_path / "none")
    for ask in (reads.runs, lambda: reads.sql("SELECT 1")):
        with pytest.raises(RatchetError, match="refuses connections"):
            ask()
    assert not list(tmp_path.iterdir())
