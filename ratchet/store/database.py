"""The connection to Postgres: one pool per process, one transaction per state change, and the migrations.

The functions of this package take the connection that `Database.begin()` yields. Only this module decides which errors
mean that Postgres cannot be reached.
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

# What asyncpg raises, beside SQLAlchemy's wrappers, while the server is away, starting or shutting down.
_UNREACHABLE = (
    ConnectionError,
    TimeoutError,
    PoolTimeoutError,  # all connections of the pool hang
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InvalidCatalogNameError,  # the server runs and `ensure_database` is about to create the database
)
_SERIALIZATION_STATES = (asyncpg.DeadlockDetectedError.sqlstate, asyncpg.SerializationError.sqlstate)


def async_url(url: str) -> str:
    """Return the URL with the asyncpg driver, for every usual scheme. Raises MachineError for any other."""
    for prefix in ("postgresql+asyncpg://", "postgresql://", "postgres://"):
        if url.startswith(prefix):
            return "postgresql+asyncpg://" + url.removeprefix(prefix)
    raise MachineError(
        f"RATCHET_DATABASE_URL begins with {url.partition(':')[0]!r} and is not a Postgres address; "
        "expected postgresql://user:password@host:port/name"
    )


def _is_unreachable(error: BaseException) -> bool:
    if isinstance(error, DBAPIError):
        return (
            error.connection_invalidated
            or isinstance(error, InterfaceError | OperationalError)
            or _is_unreachable(error.orig or Exception())
        )
    cause = error.__cause__
    return isinstance(error, _UNREACHABLE) or (cause is not None and isinstance(cause, _UNREACHABLE))


class Database:
    """A pool of connections, closed at the end of `async with`; every access goes through `begin()`."""

    def __init__(self, url: str, pool_size: int = 5) -> None:
        self.url = url
        # No overflow: its connections are closed after each use, and opening them costs more than a usual query.
        self.engine = create_async_engine(
            async_url(url), pool_size=2 * pool_size, max_overflow=0, pool_pre_ping=True, connect_args={"timeout": 10}
        )

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Open one transaction, committed if the block ends without an error.

        Raises StoreUnavailableError if Postgres cannot be reached; whether a commit in progress succeeded is then
        unknown."""
        try:
            async with self.engine.begin() as connection:
                yield connection
        except (DBAPIError, OSError, *_UNREACHABLE) as error:
            if isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _SERIALIZATION_STATES:
                raise StoreUnavailableError(
                    f"Postgres rolled a transaction back in favour of another: {error.orig}; try again"
                ) from error
            if _is_unreachable(error):
                raise StoreUnavailableError(
                    f"Postgres at {self.engine.url.host}:{self.engine.url.port} does not answer: {error}"
                ) from error
            raise

    async def wait(self, timeout_seconds: float = 60) -> None:
        """Wait until Postgres answers. Raises MachineError with the address after `timeout_seconds`."""
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
    """Bring the schema up to date. An advisory lock makes it safe for several processes to call this at once."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["url"] = async_url(url)
    command.upgrade(config, "head")
