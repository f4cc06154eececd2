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
from sqlalchemy import Dialect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import AddConstraint

from ratchet.errors import MachineError, StoreUnavailableError
from store.database import Database, async_url
from store.schema import Base

_LOG = structlog.get_logger()
_SCRIPTS = Path(__file__).parent / "migrations"
_RECORD = "alembic_version"
_DIALECT: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
_COLUMNS = text("SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()")
_CONSTRAINTS = text("SELECT conname FROM pg_constraint WHERE connamespace = current_schema()::regnamespace")
_LOCK_STATES = (asyncpg.LockNotAvailableError.sqlstate, asyncpg.DeadlockDetectedError.sqlstate)
_LOCK_TRIES = 10
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 30.0


def _config(scripts: Path, url: str = "") -> Config:
    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.attributes["url"] = url
    return config


def migrate(url: str, scripts: Path = _SCRIPTS) -> None:
    """Bring the schema up to date. An advisory lock makes it safe for several processes to call this at once.

    `scripts`: the directory of the migrations.

    A migration that does not get the lock on a table within five seconds gives way to the statements that wait behind
    it, and is tried again. Raises MachineError after ten tries, and for a damaged record of the revision at once.
    """
    asyncio.run(_require_whole_record(url, scripts))
    for number in range(_LOCK_TRIES):
        try:
            command.upgrade(_config(scripts, async_url(url)), "head")
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


async def _require_whole_record(url: str, scripts: Path) -> None:
    async with Database(url, pool_size=1) as database, database.begin() as connection:
        if problem := await schema_problem(connection, scripts):
            raise MachineError(problem)


async def _missing_constraint(connection: AsyncConnection) -> str:
    """Return which constraint is missing, with the statement that makes it; what is fenced by it is not safe."""
    there = set((await connection.execute(_CONSTRAINTS)).scalars())
    for table in Base.metadata.sorted_tables:
        for one in table.constraints:
            if one.name not in there:
                statement = " ".join(str(AddConstraint(one).compile(dialect=_DIALECT)).split())
                return f"the constraint {one.name} of {table.name} was dropped; `{statement}` makes it again"
    return ""


async def _recorded(connection: AsyncConnection) -> list[str]:
    """Return the rows of the revision's table, none if it is missing."""
    if (await connection.execute(text(f"SELECT to_regclass('{_RECORD}')"))).scalar_one() is None:
        return []
    return list((await connection.execute(text(f"SELECT version_num FROM {_RECORD}"))).scalars())


async def schema_problem(connection: AsyncConnection, scripts: Path = _SCRIPTS) -> str:
    """Return what is wrong with the record of the schema's revision, or which constraint is missing, and how that is
    undone; empty if nothing is.

    A database without tables, and one of an earlier version, has no problem: `ratchet up` migrates it.
    """
    known, head = _revisions(scripts)
    found = await _recorded(connection)
    if found == [head]:
        return await _missing_constraint(connection)
    if len(found) == 1 and found[0] in known:
        return ""
    if len(found) == 1:
        problem = f"the database has schema revision {found[0]}, which is later than this program's"
        return f"{problem} {head}; install the version of ratchet that migrated it"
    columns = {(row.table_name, row.column_name) for row in await connection.execute(_COLUMNS)}
    wanted = {(table.name, column.name) for table in Base.metadata.tables.values() for column in table.columns}
    if not found and not columns & wanted:
        return ""
    if not wanted <= columns:
        remedy = "restore it from a backup, or write the revision that its last version of ratchet needs"
    else:
        remedy = (
            f"the tables are those of this version, so run `CREATE TABLE IF NOT EXISTS {_RECORD} (version_num "
            f"varchar(32) PRIMARY KEY); DELETE FROM {_RECORD}; INSERT INTO {_RECORD} VALUES ('{head}')`"
        )
    return f"the table {_RECORD} names the schema's revision and is damaged ({len(found)} rows, expected one): {remedy}"


def _revisions(scripts: Path) -> tuple[set[str], str | None]:
    """Return the revisions that there are, and the newest one."""
    directory = ScriptDirectory.from_config(_config(scripts))
    return {script.revision for script in directory.walk_revisions()}, directory.get_current_head()


async def wait_for_schema(database: Database) -> None:
    """Wait until the database has the newest revision that this program knows, with every constraint, without a limit.

    Raises MachineError if the revision is one of a later version, which this program cannot read.
    """
    known, head = _revisions(_SCRIPTS)
    said = -_SAY_SECONDS
    while True:
        try:
            async with database.begin() as connection:
                found = await _recorded(connection)
                problem = await schema_problem(connection)
            if len(found) == 1 and found[0] not in known:
                raise MachineError(problem)
            if found == [head] and not problem:
                return
            shown = found[0] if found else None
            reason = problem or f"the schema has revision {shown}, this program needs {head}; `ratchet up` migrates it"
        except StoreUnavailableError as error:
            reason = str(error)
        if time.monotonic() - said >= _SAY_SECONDS:
            _LOG.warning("waiting for the schema", reason=reason)
            said = time.monotonic()
        await asyncio.sleep(_LOOK_SECONDS)
