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
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from ratchet.errors import MachineError, StoreUnavailableError
from ratchet.store.database import Database, async_url

_LOG = structlog.get_logger()
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
    it, and is tried again. Raises MachineError after ten tries.
    """
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


async def wait_for_schema(database: Database) -> None:
    """Wait until the database has the schema's newest revision that this program knows, without a limit.

    Raises MachineError if the revision is one of a later version, which this program cannot read.
    """
    scripts = ScriptDirectory.from_config(_config())
    wanted = scripts.get_current_head()
    known = {script.revision for script in scripts.walk_revisions()}
    said = -_SAY_SECONDS
    while True:
        try:
            async with database.begin() as connection:
                found = (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar_one_or_none()
            reason = f"the schema has revision {found}, this program needs {wanted}; `ratchet up` migrates it"
        except StoreUnavailableError as error:
            found, reason = None, str(error)
        if found == wanted:
            return
        if found is not None and found not in known:
            raise MachineError(
                f"the database has schema revision {found}, which is later than this program's {wanted}; "
                "install the version of ratchet that migrated it"
            )
        if time.monotonic() - said >= _SAY_SECONDS:
            _LOG.warning("waiting for the schema", reason=reason)
            said = time.monotonic()
        await asyncio.sleep(_LOOK_SECONDS)
