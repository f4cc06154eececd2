"""Readers cannot write, whether or not the server lets `ratchet up` create a role for them."""

from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from ratchet.errors import StoreUnavailableError
from reads.reader_role import READER_ROLE, ReadOnlyStore, grant_reader_role
from store.database import Database
from tests.integration.training.records import make_config, make_run

WRITES = (
    "UPDATE installation SET namespace_id = 'x'",
    "DELETE FROM rollout",
    "CREATE TABLE t (a int)",
    "SELECT nextval('group_ready_seq')",
)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("has_role", [True, False])
async def test_a_reader_cannot_write(database: Database, write: str, has_role: bool) -> None:
    assert await grant_reader_role(database)
    if not has_role:
        async with database.begin() as connection:
            await connection.execute(text(f"REVOKE SELECT ON rollout FROM {READER_ROLE}"))
    async with ReadOnlyStore(database.url) as store:
        async with store.read() as connection:
            assert (await connection.execute(text("SELECT current_user"))).scalar_one() == (
                READER_ROLE if has_role else (await current_user(database))
            )
        with pytest.raises((StoreUnavailableError, DBAPIError), match=r"read-only|denied"):
            async with store.read() as connection:
                await connection.execute(text(write))


@pytest.mark.parametrize("has_role", [True, False])
async def test_a_page_sees_one_state_of_the_store(database: Database, run_id: str, has_role: bool) -> None:
    """Else its numbers and its lists are of different moments."""
    if has_role:
        await grant_reader_role(database)
    count = text("SELECT count(*) FROM run")
    async with ReadOnlyStore(database.url) as store:
        async with store.read() as reader:
            before = (await reader.execute(count)).scalar_one()
            await make_run(database, run_id, make_config())
            assert (await reader.execute(count)).scalar_one() == before
        async with store.read() as reader:
            assert (await reader.execute(count)).scalar_one() == before + 1


async def test_the_role_is_taken_as_soon_as_it_exists(database: Database) -> None:
    """The viewer may start before `ratchet up` has migrated the database."""
    await grant_reader_role(database)
    async with database.begin() as connection:
        await connection.execute(text(f"REVOKE SELECT ON rollout FROM {READER_ROLE}"))
    async with ReadOnlyStore(database.url) as store:
        for expected in (await current_user(database), READER_ROLE):
            async with store.read() as connection:
                assert (await connection.execute(text("SELECT current_user"))).scalar_one() == expected
            await grant_reader_role(database)


async def current_user(database: Database) -> str:
    async with database.begin() as connection:
        return str((await connection.execute(text("SELECT current_user"))).scalar_one())


async def test_the_role_cannot_read_hashes_of_tokens(database: Database) -> None:
    await grant_reader_role(database)
    async with ReadOnlyStore(database.url) as store:
        with pytest.raises((StoreUnavailableError, DBAPIError), match="permission denied"):
            async with store.read() as connection:
                await connection.execute(text("SELECT * FROM session_token"))


async def test_a_second_grant_writes_nothing(database: Database) -> None:
    assert await grant_reader_role(database)
    async with database.begin() as connection:
        before = (await connection.execute(text("SELECT xmin FROM pg_class WHERE relname = 'rollout'"))).scalar_one()
    assert await grant_reader_role(database)
    async with database.begin() as connection:
        after = (await connection.execute(text("SELECT xmin FROM pg_class WHERE relname = 'rollout'"))).scalar_one()
    assert before == after


async def test_without_the_right_to_create_roles_readers_still_cannot_write(database: Database) -> None:
    """A managed Postgres: the stack's own role owns the tables and may create none."""
    name = f"owner_{uuid4().hex[:8]}"
    async with database.begin() as connection:
        await connection.execute(text(f"CREATE ROLE {name} LOGIN"))
        await connection.execute(text(f"GRANT SELECT, UPDATE ON ALL TABLES IN SCHEMA public TO {name}"))
        await connection.execute(text(f"REVOKE SELECT ON rollout FROM {READER_ROLE}"))
    scheme, _, place = database.url.rpartition("//")
    url = f"{scheme}//{name}@{place.rpartition('@')[2]}"
    try:
        async with Database(url, pool_size=1) as own:
            assert not await grant_reader_role(own)
        async with ReadOnlyStore(url) as store:
            async with store.read() as connection:
                await connection.execute(text("SELECT count(*) FROM rollout"))
            with pytest.raises((StoreUnavailableError, DBAPIError), match="read-only"):
                async with store.read() as connection:
                    await connection.execute(text(WRITES[0]))
    finally:
        async with database.begin() as connection:
            await connection.execute(text(f"DROP OWNED BY {name}"))
            await connection.execute(text(f"DROP ROLE {name}"))
        await grant_reader_role(database)


async def test_a_reader_does_not_hold_up_a_writer_for_long(database: Database) -> None:
    async with ReadOnlyStore(database.url) as store, store.read() as connection:
        row = await connection.execute(
            text("SELECT current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout')")
        )
        assert tuple(row.one()) == ("10s", "10s")


async def test_a_reader_whose_transaction_lasts_is_ended(database: Database) -> None:
    """Each statement is short, but the locks on their tables are held until the last one."""
    async with database.begin() as connection:
        known = await connection.execute(text("SELECT name FROM pg_settings WHERE name = 'transaction_timeout'"))
        if not known.all():
            pytest.skip("Postgres has this limit from version 17 on")
    async with ReadOnlyStore(database.url, transaction_seconds=0.5) as store:
        with pytest.raises(StoreUnavailableError):
            async with store.read() as connection:
                for _ in range(100):
                    await connection.execute(text("SELECT pg_sleep(0.05)"))
        async with store.read() as connection:
            assert (await connection.execute(text("SELECT 1"))).scalar_one() == 1
