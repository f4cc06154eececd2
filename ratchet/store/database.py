"""The connection to Postgres: one pool per process, one transaction per state change, migrations.

Why here: "cannot reach Postgres" is classified in this one place.
Called by: every process that touches the store; the functions of this folder take the connection that `begin()` yields.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import asyncpg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from ratchet.errors import MachineError, StoreUnavailableError

# What asyncpg raises, beside SQLAlchemy's own wrappers, when the server is away, starting, or shutting down. A database that does not
# exist yet is one that `ensure_database` is about to make.
_AWAY = (
    ConnectionError,
    TimeoutError,
    PoolTimeoutError,  # every connection hangs: so does the server
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InvalidCatalogNameError,  # the server is up, and its database is being made
)


_TRY_AGAIN = (asyncpg.DeadlockDetectedError.sqlstate, asyncpg.SerializationError.sqlstate)


def async_url(url: str) -> str:
    """The URL with the asyncpg driver named, whichever spelling of Postgres the user wrote."""
    for prefix in ("postgresql+asyncpg://", "postgresql://", "postgres://"):
        if url.startswith(prefix):
            return "postgresql+asyncpg://" + url.removeprefix(prefix)
    raise MachineError(
        f"RATCHET_DATABASE_URL begins with {url.partition(':')[0]!r} and is no Postgres address; expected postgresql://user:password@host:port/name"
    )


def _is_away(error: BaseException) -> bool:
    if isinstance(error, DBAPIError):
        return (
            error.connection_invalidated
            or isinstance(error, InterfaceError | OperationalError)
            or _is_away(error.orig or Exception())
        )
    cause = error.__cause__
    return isinstance(error, _AWAY) or (cause is not None and isinstance(cause, _AWAY))


class Database:
    """A pool of connections, closed at the end of `async with`. `begin()` is the only way in: one transaction, committed when the block ends
    without an error."""

    def __init__(self, url: str, pool_size: int = 5) -> None:
        self.url = url
        # No overflow: its connections are closed after each use, and under load opening them anew costs more than the work.
        self.engine = create_async_engine(
            async_url(url), pool_size=2 * pool_size, max_overflow=0, pool_pre_ping=True, connect_args={"timeout": 10}
        )

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Raises StoreUnavailableError where Postgres cannot be reached; whether a commit in flight arrived is then unknown."""
        try:
            async with self.engine.begin() as connection:
                yield connection
        except (DBAPIError, OSError, *_AWAY) as error:
            if isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _TRY_AGAIN:
                raise StoreUnavailableError(
                    f"Postgres undid a transaction in favour of another: {error.orig}; try again"
                ) from error
            if _is_away(error):
                raise StoreUnavailableError(
                    f"Postgres at {self.engine.url.host}:{self.engine.url.port} does not answer: {error}"
                ) from error
            raise

    async def wait(self, timeout_seconds: float = 60) -> None:
        """Until Postgres answers; raises MachineError with the address after `timeout_seconds`."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        delay = 0.1
        while True:
            try:
                async with self.begin() as connection:
                    await connection.exec_driver_sql("SELECT 1")
                return
            except StoreUnavailableError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise MachineError(
                        f"{error}; start it, or unset RATCHET_DATABASE_URL to use the embedded one"
                    ) from error
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def close(self) -> None:
        await self.engine.dispose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def migrate(url: str) -> None:
    """Brings the schema up to date; safe to run at any start and by several processes at once (an advisory lock orders them)."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["url"] = async_url(url)
    command.upgrade(config, "head")
