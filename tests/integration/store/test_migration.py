"""The schema is that of the mapped classes; later migrations beside a stack that works; parts that wait for them."""

import asyncio
import hashlib
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from ratchet.errors import MachineError, StoreUnavailableError
from store import migration
from store.database import Database, async_url
from store.migration import migrate, wait_for_schema
from store.schema import Base

RELEASED = {
    "0001_initial_schema.py": "87fad01c8ae8912c8808dd69ceb69156e25668ece492940c3978b07d0b8ebe93",
    "0001_initial_schema.sql": "d825a7a6c37093e75708ea615365441862266dd27bc1c54ae98f5cc9b3342724",
}
"""Name of each file of a released migration -> its sha256. A release adds the files that are new in it."""
SCRIPTS = Path(migration.__file__).parent / "migrations"
RUN = """INSERT INTO run (run_id, config, config_digest, config_name, seed, model_path)
VALUES ('old', '{"a": 1}', 'd', 'c', 0, '/m')"""
ROLLOUT = """WITH task AS (INSERT INTO task (dataset, dataset_digest, row_digest, row_no, label, image, workdir, grader,
spec) VALUES ('d', 'd', 'r', 0, 't', 'host', '/w', 'g', '{}') RETURNING id)
INSERT INTO rollout (run_id, task_id, member, purpose, workflow_id, harness, temperature)
SELECT 'old', id, 0, 'train', 'w', 'h', 1 FROM task"""
MIGRATE = "import sys, pathlib; from store.migration import migrate; migrate(sys.argv[1], pathlib.Path(sys.argv[2]))"
INVALID = "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid"
WITHOUT_INDEX = """SELECT conrelid::regclass::text, attname FROM pg_constraint
JOIN pg_attribute ON attrelid = conrelid AND attnum = conkey[1]
WHERE contype = 'f' AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = conrelid AND indkey[0] = conkey[1])"""
CATALOGUE = """
SELECT 'column', attrelid::regclass::text, attname, format_type(atttypid, atttypmod)
    || CASE WHEN attnotnull THEN ' not null' ELSE '' END
    || attidentity::text || coalesce(pg_get_expr(adbin, adrelid), '')
  FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
    LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
  WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND attnum > 0 AND NOT attisdropped
UNION ALL SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid)
  FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND contype <> 'n'
UNION ALL SELECT 'index', tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL SELECT 'sequence', '', sequencename, data_type::text FROM pg_sequences WHERE schemaname = 'public'
"""
LATER = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9998", "0006"


def upgrade():
    {}
"""
ADDS_A_COLUMN = 'op.add_column("run", sa.Column("added", sa.Text(), nullable=True))'
BUILDS_AN_INDEX = """with op.get_context().autocommit_block():
        op.execute("SET lock_timeout = 0")
        op.drop_index("ix_added", table_name="rollout", postgresql_concurrently=True, if_exists=True)
        op.create_index("ix_added", "rollout", ["harness"], postgresql_concurrently=True)
        op.execute("SET lock_timeout = '5s'")"""
"""A migration that adds an index to a table that grows: beside the statements of a running stack, after the rest of an
interrupted build is dropped."""


@pytest.fixture
async def url(postgres_url: str) -> AsyncIterator[str]:
    """Return the address of an empty database."""
    name = f"migration_{uuid4().hex[:8]}"
    engine = create_async_engine(async_url(postgres_url), isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {name}"))
        yield postgres_url.rpartition("/")[0] + f"/{name}"
        await connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    await engine.dispose()


def with_later(directory: Path, statements: str) -> Path:
    """Return a directory of migrations that has one more, which a later version adds."""
    scripts = Path(shutil.copytree(SCRIPTS, directory / "migrations"))
    (scripts / "versions" / "9998_later.py").write_text(LATER.format(statements))
    return scripts


async def test_the_migrated_schema_is_that_of_the_mapped_classes(url: str) -> None:
    """Columns, defaults, constraints, indexes and sequences, with their names."""
    await asyncio.to_thread(migrate, url)
    async with Database(url, pool_size=1) as database, database.begin() as connection:
        await connection.execute(text("DROP TABLE alembic_version"))
        migrated = {tuple(row) for row in await connection.execute(text(CATALOGUE))}
        await connection.execute(text("DROP SCHEMA public CASCADE"))
        await connection.execute(text("CREATE SCHEMA public"))
        await connection.run_sync(Base.metadata.create_all)
        created = {tuple(row) for row in await connection.execute(text(CATALOGUE))}
    assert len(migrated) > len(Base.metadata.tables) and migrated == created


def test_released_migrations_are_frozen() -> None:
    """Nothing runs them again in a database that has them, so an edited one would make another schema there."""
    found = {name: (SCRIPTS / "versions" / name).read_bytes() for name in RELEASED}
    assert {name: hashlib.sha256(content).hexdigest() for name, content in found.items()} == RELEASED


async def test_parts_wait_for_the_schema_that_they_know(url: str) -> None:
    async with Database(url, pool_size=1) as database:
        waiting = asyncio.create_task(wait_for_schema(database))
        done, _ = await asyncio.wait([waiting], timeout=2)
        assert not done, "there are no tables"
        await asyncio.to_thread(migrate, url)
        await asyncio.wait_for(waiting, 10)


async def test_a_part_of_the_version_before_refuses_the_schema_of_the_next(url: str, tmp_path: Path) -> None:
    scripts = with_later(tmp_path, ADDS_A_COLUMN)
    await asyncio.to_thread(migrate, url)
    await asyncio.to_thread(migrate, url, scripts)
    async with Database(url, pool_size=1) as database:
        with pytest.raises(MachineError, match="9998, which is later"):
            await wait_for_schema(database)
    with pytest.raises(MachineError, match="9998, which is later"):
        await asyncio.to_thread(migrate, url)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("DROP TABLE alembic_version", "0 rows"),
        ("DELETE FROM alembic_version", "0 rows"),
        ("INSERT INTO alembic_version VALUES ('0000')", "2 rows"),
        ("ALTER TABLE run DROP COLUMN seed; DELETE FROM alembic_version", "restore it from a backup"),
    ],
)
async def test_a_damaged_record_of_the_revision_is_named_with_its_remedy(url: str, damage: str, found: str) -> None:
    await asyncio.to_thread(migrate, url)
    async with Database(url, pool_size=1) as database:
        async with database.begin() as connection:
            for statement in damage.split("; "):
                await connection.execute(text(statement))
        with pytest.raises(MachineError, match=found) as refused:
            await asyncio.to_thread(migrate, url)
        waiting = asyncio.create_task(wait_for_schema(database))
        remedy = str(refused.value).partition("so run `")[2].rstrip("`")
        if not remedy:
            waiting.cancel()
            return
        async with database.begin() as connection:
            for statement in remedy.split("; "):
                await connection.execute(text(statement))
        await asyncio.wait_for(waiting, 30)  # parts wait until it is undone
        await asyncio.to_thread(migrate, url)


async def test_a_dropped_unique_index_is_waited_for_and_named(url: str) -> None:
    """A statement that needs it is repeated, because somebody can make it again; nothing is written twice meanwhile."""
    await asyncio.to_thread(migrate, url)
    async with Database(url, pool_size=1) as database:
        async with database.begin() as connection:
            await connection.execute(text("ALTER TABLE engine DROP CONSTRAINT uq_engine_address_engine_set"))
        with pytest.raises(StoreUnavailableError, match="ON CONFLICT"):
            async with database.begin() as connection:
                insert = "INSERT INTO engine (address, state, model_path) VALUES ('a', 'ready', '')"
                await connection.execute(text(f"{insert} ON CONFLICT (address, engine_set) DO NOTHING"))
        with pytest.raises(MachineError, match="uq_engine_address_engine_set of engine was dropped") as refused:
            await asyncio.to_thread(migrate, url)
        starting = asyncio.create_task(wait_for_schema(database))
        assert not (await asyncio.wait({starting}, timeout=0.5))[0], "a part that starts waits, too"
        async with database.begin() as connection:
            await connection.execute(text(str(refused.value).split("`")[1]))
        await asyncio.wait_for(starting, 30)
        await asyncio.to_thread(migrate, url)


async def test_a_short_statement_timeout_of_the_database_ends_no_migration(url: str) -> None:
    async with Database(url, pool_size=1) as database, database.begin() as connection:
        name = url.rpartition("/")[2]
        await connection.execute(text(f"ALTER DATABASE {name} SET statement_timeout = '50ms'"))
    await asyncio.to_thread(migrate, url)
    async with Database(url, pool_size=1) as database, database.begin() as connection:
        await connection.execute(text("SELECT pg_sleep(0.2)"))


async def test_a_migration_does_not_hold_up_a_stack_that_works(url: str, tmp_path: Path) -> None:
    """A long transaction keeps the migration from its lock; other statements pass in between."""
    scripts = with_later(tmp_path, ADDS_A_COLUMN)
    await asyncio.to_thread(migrate, url)
    async with Database(url, pool_size=2) as database:
        async with database.begin() as holder:
            await holder.execute(text("SELECT count(*) FROM run"))
            migration = asyncio.create_task(asyncio.to_thread(migrate, url, scripts))
            await asyncio.sleep(1)
            begun = time.monotonic()
            async with database.begin() as connection:
                await connection.execute(text(RUN))
            assert time.monotonic() - begun < 20, "the statement waited for the migration"
            assert not migration.done()
        await migration


async def test_indexes_are_built_beside_statements_that_write(url: str, tmp_path: Path) -> None:
    """The build waits for an older transaction on the table; other processes write meanwhile, and migrate, too."""
    scripts = with_later(tmp_path, BUILDS_AN_INDEX)
    await asyncio.to_thread(migrate, url)
    async with Database(url, pool_size=3) as database:
        async with database.begin() as holder:
            await holder.execute(text("SELECT count(*) FROM rollout"))
            command = [
                sys.executable,
                "-c",
                MIGRATE,
                url,
                str(scripts),
            ]  # processes, because alembic is not made for threads
            migrations = [await asyncio.create_subprocess_exec(*command) for _ in range(2)]
            async with asyncio.timeout(60):
                while not await _builds(database):
                    await asyncio.sleep(0.05)
            async with database.begin() as connection:
                await connection.execute(text(RUN))
                await connection.execute(text(ROLLOUT))
            assert [one.returncode for one in migrations] == [None, None]
        assert [await one.wait() for one in migrations] == [0, 0]
        assert await _indexes_without_use(database) == []


async def _builds(database: Database) -> bool:
    async with database.begin() as connection:
        building = "SELECT count(*) FROM pg_stat_progress_create_index WHERE lockers_total > 0"
        return bool((await connection.execute(text(building))).scalar_one())


async def _indexes_without_use(database: Database) -> list[str]:
    async with database.begin() as connection:
        return list((await connection.execute(text(INVALID))).scalars())


async def test_an_interrupted_build_is_made_again(url: str, tmp_path: Path) -> None:
    scripts = with_later(tmp_path, BUILDS_AN_INDEX)
    await asyncio.to_thread(migrate, url)
    async with Database(url, pool_size=2) as database:
        async with database.begin() as connection:
            await connection.execute(text("CREATE INDEX ix_added ON rollout (member)"))
            await connection.execute(
                text("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_added'::regclass")
            )
        await asyncio.to_thread(migrate, url, scripts)
        assert await _indexes_without_use(database) == []
        async with database.begin() as connection:
            definition = "SELECT pg_get_indexdef('ix_added'::regclass)"
            assert "(harness)" in (await connection.execute(text(definition))).scalar_one()


async def test_every_foreign_key_of_a_growing_table_has_an_index(url: str) -> None:
    """Without one, the deletion of the row that it refers to reads the whole table."""
    await asyncio.to_thread(migrate, url)
    async with Database(url, pool_size=1) as database, database.begin() as connection:
        missing = {tuple(row) for row in await connection.execute(text(WITHOUT_INDEX))}
    assert missing == {("run_task", "task_id"), ("run", "source_run_id")}, "one row per run, and per run and task"
