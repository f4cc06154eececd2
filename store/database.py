"""The connection to Postgres: one pool per process, one transaction per state change.

The functions of this package take the connection that `Database.begin()` yields. Only this module decides which errors
mean that Postgres does not work, and only this module makes texts storable: those of every statement, also in JSON, so
that no caller can forget it.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Self, TypeVar, TypeVarTuple

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine.interfaces import AdaptedConnection, DBAPIConnection
from sqlalchemy.exc import DBAPIError, InvalidatePoolError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import greenlet_spawn

from ratchet.errors import MachineError, StoreUnavailableError
from ratchet.patience import ANSWER_SECONDS, Patience
from ratchet.storable_values import storable_json, storable_text
from store.database_address import require_usable_address

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")
_NO_ANSWER = (
    OSError,
    TimeoutError,
    PoolTimeoutError,  # all connections of the pool hang
    asyncpg.PostgresError,  # raised while a connection is made, so SQLAlchemy has not wrapped it
    asyncpg.InternalClientError,  # the connection broke in the middle of a message
    asyncpg.InterfaceError,  # the connection was closed before the statement
)
"""Errors, beside SQLAlchemy's wrappers, of a server that is away, starting, shutting down, full or damaged."""
_STATEMENT_SECONDS = 60.0
"""Limit of one statement. Without it a process waits for about 15 minutes if the server's host falls silent."""
_SERVER_GRACE_SECONDS = 5.0
"""The server ends a statement so much later by itself: that of a process which has fallen silent."""
_IDLE_SECONDS = 120.0
"""Time without a statement after which the server ends an open transaction, whose locks others may wait for: that of a
process which is suspended or cut off."""


_CLASS_42_OF_THE_SERVER = {
    asyncpg.InsufficientPrivilegeError.sqlstate,
    asyncpg.UndefinedTableError.sqlstate,
    asyncpg.UndefinedColumnError.sqlstate,
    asyncpg.UndefinedObjectError.sqlstate,
    asyncpg.UndefinedFunctionError.sqlstate,
    asyncpg.InvalidColumnReferenceError.sqlstate,  # the unique index that an ON CONFLICT needs was dropped
    asyncpg.DuplicatePreparedStatementError.sqlstate,  # a connection pooler in transaction mode
}
"""Errors of class 42, wrong SQL, that a migration, an index, a grant or a setting of the server mends."""


def _is_statements_fault(error: BaseException | None) -> bool:
    """Return whether the statement or its values are wrong, so that it would fail on a healthy server, too.

    That is: a value of the wrong kind, a violated constraint, or wrong SQL. Any other error of the server can go away
    without a change of the statement: no disk space, a read-only replica, a time limit, a missing privilege, or a
    schema that is older than this program.
    """
    if isinstance(error, asyncpg.exceptions.InterfaceError):
        return isinstance(error, ValueError)  # asyncpg cannot encode a value
    state: str = getattr(error, "sqlstate", None) or ""
    return state[:2] in ("22", "23", "42") and state not in _CLASS_42_OF_THE_SERVER


def async_url(url: str) -> str:
    """Return the URL with the asyncpg driver, for every usual scheme. Raises MachineError for any other, and
    ConfigError for a URL with which no connection can be made.

    `sslmode`, as most services write it, is `ssl` for this driver.
    """
    for prefix in ("postgresql+asyncpg://", "postgresql://", "postgres://"):
        if url.startswith(prefix):
            own = re.sub(r"(?<=[?&])sslmode=", "ssl=", "postgresql+asyncpg://" + url.removeprefix(prefix))
            require_usable_address(own)
            return own
    raise MachineError(
        f"RATCHET_DATABASE_URL begins with {url.partition(':')[0]!r} and is not a Postgres address; "
        "expected postgresql://user:password@host:port/name"
    )


def libpq_url(url: str) -> str:
    """Return the URL for libpq's programs, Temporal and asyncpg without SQLAlchemy. Raises as `async_url`."""
    return re.sub(r"(?<=[?&])ssl=", "sslmode=", async_url(url).replace("+asyncpg", "", 1))


def error_sources(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from: SQLAlchemy's error, its driver's and asyncpg's."""
    inner: BaseException | None = error
    while inner is not None:
        yield inner
        inner = inner.orig if isinstance(inner, DBAPIError) else inner.__cause__


def _storable_list(value: object) -> object:
    """Return a list with storable texts; asyncpg encodes the texts of lists by itself. Other values as they are."""
    if isinstance(value, list) and any(isinstance(one, str) for one in value):
        return [storable_text(one) if isinstance(one, str) else one for one in value]
    return value


async def _make_texts_storable(connection: asyncpg.Connection) -> None:
    """Write what Postgres refuses in texts as escapes, in all values of this connection's statements but lists."""
    coders = {"encoder": lambda text: storable_text(text).encode(), "decoder": bytes.decode}
    for name in ("text", "varchar"):
        await connection.set_type_codec(name, schema="pg_catalog", format="binary", **coders)


class Database:
    """A pool of connections, closed at the end of `async with`; every access goes through `begin()`."""

    def __init__(
        self,
        url: str,
        pool_size: int = 5,
        statement_seconds: float = _STATEMENT_SECONDS,
        idle_seconds: float = _IDLE_SECONDS,
        is_reader: bool = False,
        is_patient: bool = False,
    ) -> None:
        """`idle_seconds`: the server ends a transaction in which no statement is sent for so long.

        `is_reader`: texts are sent as they are, so that Postgres refuses those that no row can have.

        `is_patient`: of a command, which waits for a slow server and says so."""
        self.url = url
        connect_seconds = min(10.0, statement_seconds)
        if is_patient:
            statement_seconds, idle_seconds, connect_seconds = ANSWER_SECONDS, 2 * ANSWER_SECONDS, 2 * ANSWER_SECONDS
        # No overflow: its connections are closed after each use, and opening them costs more than a usual query.
        self.engine = create_async_engine(
            async_url(url),
            pool_size=2 * pool_size,
            max_overflow=0,
            json_serializer=storable_json,
            connect_args={"timeout": connect_seconds, "command_timeout": statement_seconds},
        )
        self._reading = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        address = f"Postgres at {self.engine.url.host}:{self.engine.url.port}"
        self._patience = Patience(address) if is_patient else None
        limits = {
            "statement_timeout": statement_seconds + _SERVER_GRACE_SECONDS,
            "idle_in_transaction_session_timeout": idle_seconds,
        }

        # By a statement, because connection poolers refuse unknown parameters of a connection.
        @event.listens_for(self.engine.sync_engine, "connect", insert=True)  # before the driver asks for versions
        def set_up(connection: DBAPIConnection, _: object) -> None:
            cursor = connection.cursor()
            for name, seconds in limits.items():
                cursor.execute(f"SET {name} = {round(1000 * seconds)}")
            cursor.close()
            connection.commit()
            assert isinstance(connection, AdaptedConnection)
            if not is_reader:
                connection.run_async(_make_texts_storable)

        # The driver sees when the server ends a connection. SQLAlchemy's `pool_pre_ping` asks the server before each
        # use, in a transaction: as many messages as a usual transaction of ours.
        @event.listens_for(self.engine.sync_engine, "checkout")
        def replace_closed(connection: DBAPIConnection, *_: object) -> None:
            assert isinstance(connection, AdaptedConnection)
            if connection.driver_connection.is_closed():
                raise InvalidatePoolError

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Open one transaction, committed if the block ends without an error.

        Raises StoreUnavailableError for every error of the server that a healthy one would not give; whether a commit
        in progress succeeded is then unknown. An error of the statement itself is raised as it is."""
        async with self._connected(self.engine.begin()) as connection:
            yield connection

    @asynccontextmanager
    async def _connected(self, opened: AbstractAsyncContextManager[AsyncConnection]) -> AsyncIterator[AsyncConnection]:
        connected = False
        waits = self._patience.waiting() if self._patience is not None else nullcontext()
        with self._store_errors(lambda: connected), waits:
            async with opened as connection:
                connected = True
                assert connection.sync_connection is not None
                pooled = connection.sync_connection.connection
                try:
                    yield connection
                except TimeoutError:  # a rollback on this connection would wait as long
                    self._replace_idle(pooled)
                    await connection.invalidate()
                    raise

    async def run(self, work: Callable[[AsyncConnection, *_Arguments], Awaitable[_T]], *arguments: *_Arguments) -> _T:
        """Call a function of this package in a transaction of its own. Raises what `begin` and the function raise."""
        async with self.begin() as connection:
            return await work(connection, *arguments)

    async def read(self, work: Callable[[AsyncConnection, *_Arguments], Awaitable[_T]], *arguments: *_Arguments) -> _T:
        """Call a function of this package that neither writes nor locks, without a transaction around its statements:
        each is one message to the server in place of three. Raises what `begin` and the function raise."""
        async with self._connected(self._reading.connect()) as connection:
            return await work(connection, *arguments)

    async def fetch(self, statement: str, *values: object) -> list[asyncpg.Record]:
        """Run one statement as a transaction of its own and return its rows. Raises what `begin` raises.

        It goes to the driver at once: one message to the server in place of four, and without SQLAlchemy's part of the
        time, which is most of it. For the statements of every model call; all others use `begin`. `statement` has
        asyncpg's `$1`, and jsonb values are text."""
        connected = False
        with self._store_errors(lambda: connected):
            connection = await self.engine.raw_connection()
            connected = True
            driver = connection.driver_connection
            assert driver is not None
            try:
                rows = list(await driver.fetch(statement, *map(_storable_list, values)))
            except BaseException as error:  # SQLAlchemy does not see the error: the connection may be broken
                if isinstance(error, TimeoutError):
                    self._replace_idle(connection)
                await greenlet_spawn(connection.invalidate)
                raise
            await greenlet_spawn(connection.close)
            return rows

    def _replace_idle(self, silent: PoolProxiedConnection) -> None:
        """Let the pool replace its idle connections before their next use: they fell silent with this one, and each
        would cost its caller the same time-out. SQLAlchemy itself does so after a connection that has broken."""
        self.engine.pool._invalidate(silent, _checkin=False)

    @contextmanager
    def _store_errors(self, is_connected: Callable[[], bool]) -> Iterator[None]:
        """Raise StoreUnavailableError for the server's errors, see `begin`."""
        try:
            yield
        except Exception as error:
            # Before there is a connection, no statement can be at fault: a certificate may be missing for a while.
            if is_connected():
                of_a_connection = not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError)
                is_the_servers = isinstance(error, (DBAPIError, *_NO_ANSWER)) and of_a_connection
                if not is_the_servers or any(_is_statements_fault(one) for one in error_sources(error)):
                    raise
            address = f"Postgres at {self.engine.url.host}:{self.engine.url.port}"
            reason = list(error_sources(error))[-1]
            if isinstance(reason, ConnectionRefusedError):
                raise StoreUnavailableError(f"{address} refuses connections") from error
            raise StoreUnavailableError(f"{address} does not work: {type(reason).__name__}: {reason}") from error

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
