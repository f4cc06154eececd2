"""The schema's revision: bring a database up to date, and wait until somebody has.

`ratchet up` migrates before it continues runs. Every other part waits for the revision that it was written for, so that
no part of a new version works on an old schema.
"""

import asyncio
import time
from pathlib import Path

import asyncpg
import structlog
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Dialect, Index, PrimaryKeyConstraint, UniqueConstraint, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import AddConstraint, CreateIndex

from ratchet.errors import MachineError, StoreUnavailableError
from ratchet.store.database import Database, async_url
from ratchet.store.schema import Base

_LOG = structlog.get_logger()
_RECORD = "alembic_version"
_DIALECT: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
_COLUMNS = text("SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()")
_UNIQUE_INDEXES = text("""
    SELECT relname AS table_name, array_agg(attname::text) AS column_names
    FROM pg_index JOIN pg_class ON pg_class.oid = indrelid JOIN pg_attribute ON attrelid = indrelid
    WHERE indisunique AND attnum = ANY(indkey) AND relnamespace = current_schema()::regnamespace
    GROUP BY indexrelid, relname
""")
_LOCK_STATES = (asyncpg.LockNotAvailableError.sqlstate, asyncpg.DeadlockDetectedError.sqlstate)
_LOCK_TRIES = 10
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 30.0


def _config(url: str = "") -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["url"] = url
    return config


def migrate(url: str) -> None:
    """Bring the schema up to date. An advisory lock makes it safe for several processes to call this at once.

    A migration that does not get the lock on a table within five seconds gives way to the statements that wait behind
    it, and is tried again. Raises MachineError after ten tries, and at once if the record of the schema's revision is
    damaged.
    """
    asyncio.run(_require_whole_record(url))
    for number in range(_LOCK_TRIES):
        try:
            command.upgrade(_config(async_url(url)), "head")
            return
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in _LOCK_STATES:
                raise
            _LOG.warning("migration waits for a lock", try_number=number + 1, reason=str(error.orig))
            time.sleep(1)
    raise MachineError(
        "the database cannot be migrated, because other transactions hold its tables; "
        "look for long ones in pg_stat_activity, end them, and run the command again"
    )


async def _require_whole_record(url: str) -> None:
    async with Database(url, pool_size=1) as database, database.begin() as connection:
        if problem := await schema_problem(connection):
            raise MachineError(problem)


async def _missing_constraint(connection: AsyncConnection) -> str:
    """Return which unique index is missing, with the statement that makes it; what is fenced by it is not safe."""
    # By columns, because the migrations named some of them otherwise.
    there = {(row.table_name, frozenset(row.column_names)) for row in await connection.execute(_UNIQUE_INDEXES)}
    for table in Base.metadata.tables.values():
        indexes = [index for index in table.indexes if index.unique]
        constraints = [one for one in table.constraints if isinstance(one, PrimaryKeyConstraint | UniqueConstraint)]
        for one in (*indexes, *constraints):
            if (table.name, frozenset(column.name for column in one.columns)) not in there:
                make = CreateIndex(one) if isinstance(one, Index) else AddConstraint(one)
                statement = " ".join(str(make.compile(dialect=_DIALECT)).split())
                return f"the unique index {one.name} of {table.name} was dropped; `{statement}` makes it again"
    return ""


async def _recorded(connection: AsyncConnection) -> list[str]:
    """Return the rows of the revision's table, none if it is missing."""
    if (await connection.execute(text(f"SELECT to_regclass('{_RECORD}')"))).scalar_one() is None:
        return []
    return list((await connection.execute(text(f"SELECT version_num FROM {_RECORD}"))).scalars())


async def schema_problem(connection: AsyncConnection) -> str:
    """Return what is wrong with the record of the schema's revision and how that is undone; empty if nothing is.

    A database without tables, and one of an earlier version, has no problem: `ratchet up` migrates it.
    """
    scripts = ScriptDirectory.from_config(_config())
    known = {script.revision for script in scripts.walk_revisions()}
    columns = {(row.table_name, row.column_name) for row in await connection.execute(_COLUMNS)}
    tables = {table for table, _ in columns}
    found = await _recorded(connection)
    if found == [scripts.get_current_head()]:
        return await _missing_constraint(connection)
    if len(found) == 1 and found[0] in known:
        return ""
    if not found and not tables & set(Base.metadata.tables):
        return ""
    if len(found) == 1:
        problem = f"the database has schema revision {found[0]}, which is later than this program's"
        return f"{problem} {scripts.get_current_head()}; install the version of ratchet that migrated it"
    problem = f"{len(found)} rows" if _RECORD in tables else "missing"
    wanted = {(table.name, column.name) for table in Base.metadata.tables.values() for column in table.columns}
    if not wanted <= columns:
        remedy = "restore it from a backup, or write the revision that its last version of ratchet needs"
    else:
        remedy = (
            f"the tables are those of this version, so run `CREATE TABLE IF NOT EXISTS {_RECORD} (version_num "
            f"varchar(32) PRIMARY KEY); DELETE FROM {_RECORD}; INSERT INTO {_RECORD} VALUES "
            f"('{scripts.get_current_head()}')`"
        )
    return f"the table {_RECORD}, which names the schema's revision, is damaged ({problem}, expected one row): {remedy}"


async def wait_for_schema(database: Database) -> None:
    """Wait until the database has the schema's newest revision that this program knows, with every unique index of it,
    without a limit.

    Raises MachineError if the revision is one of a later version, which this program cannot read.
    """
    scripts = ScriptDirectory.from_config(_config())
    wanted = scripts.get_current_head()
    known = {script.revision for script in scripts.walk_revisions()}
    said = -_SAY_SECONDS
    while True:
        try:
            async with database.begin() as connection:
                found = await _recorded(connection)
                problem = await schema_problem(connection)
                if found == [wanted] and not problem:
                    return
            shown = found[0] if found else None
            older = f"the schema has revision {shown}, this program needs {wanted}; `ratchet up` migrates it"
            reason = problem or older
            if len(found) == 1 and found[0] not in known:
                raise MachineError(reason)
        except StoreUnavailableError as error:
            reason = str(error)
        if time.monotonic() - said >= _SAY_SECONDS:
            _LOG.warning("waiting for the schema", reason=reason)
            said = time.monotonic()
        await asyncio.sleep(_LOOK_SECONDS)
