"""Read access to the store that cannot write, hold locks for long or take many connections.

Every transaction is read-only and has a short statement timeout. It also takes the role `ratchet_reader`, which may
only read, if `grant_reader_role` could create it: a managed Postgres may refuse to create roles.

A statement can give a role back that was taken in a transaction, so this confines only statements that are written
here. Those of other people run in a session that has logged in as a reader (`reader_url`, `is_confined`).
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import asyncpg
import structlog
from sqlalchemy import event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import StoreUnavailableError
from store.database import Database, async_url, error_sources
from store.schema import Base, SessionTokenTable

READER_ROLE = "ratchet_reader"
READER_URL_VARIABLE = "RATCHET_READER_DATABASE_URL"
"""Names the login of a reader on a server that lets `ratchet_reader` not log in without a password."""
_LOG = structlog.get_logger()
_STATEMENT_SECONDS = 5.0
_IDLE_SECONDS = 10.0
_TRANSACTION_SECONDS = 30.0
"""Limit of all statements of a page together: its locks on tables hold up a migration and all that waits behind it."""
HIDDEN_TABLES = frozenset({SessionTokenTable.__tablename__})
"""Tables that no page needs and that the role cannot read: hashes of bearer tokens."""

_MISSING = text(
    "SELECT NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :role) OR EXISTS ("
    "SELECT FROM unnest(CAST(:tables AS text[])) AS one"
    " WHERE NOT has_table_privilege(CAST(:role AS name), one, 'SELECT'))"
)
_MAY_USE = text(
    "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = :role)"
    " AND pg_has_role(current_user, (SELECT oid FROM pg_roles WHERE rolname = :role), 'MEMBER')"
    " AND has_table_privilege((SELECT oid FROM pg_roles WHERE rolname = :role), 'rollout', 'SELECT')"
)
_IS_CONFINED = text(
    "SELECT NOT (own.rolsuper OR own.rolcreaterole OR own.rolreplication)"
    " AND NOT EXISTS (SELECT FROM pg_auth_members WHERE member = own.oid)"
    " AND NOT EXISTS (SELECT FROM pg_database WHERE datdba = own.oid)"
    " AND NOT EXISTS (SELECT FROM pg_class WHERE relowner = own.oid)"
    " AND NOT EXISTS (SELECT FROM unnest(CAST(:hidden AS text[])) AS one"
    " WHERE has_table_privilege(own.oid, to_regclass(one), 'SELECT'))"
    " FROM pg_roles AS own WHERE own.rolname = session_user"
)
_BEGIN = text("SELECT set_config('transaction_read_only', 'on', true)")
_BEGIN_AS_READER = text("SELECT set_config('transaction_read_only', 'on', true), set_config('role', :role, true)")


async def grant_reader_role(database: Database) -> bool:
    """Create the role and let it read every table but those with secrets; return False if the server refuses.

    The role logs in without a password, which only a server like the embedded one accepts, that trusts its machine.
    `ratchet up` calls this after each migration; if nothing is missing, nothing is written.
    """
    tables = sorted(name for name in Base.metadata.tables if name not in HIDDEN_TABLES)
    try:
        async with database.begin() as connection:
            found = await connection.execute(_MISSING, {"role": READER_ROLE, "tables": tables})
            if not found.scalar_one():
                return True
            exists = text("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = :role)")
            if not (await connection.execute(exists, {"role": READER_ROLE})).scalar_one():
                await connection.exec_driver_sql(f"CREATE ROLE {READER_ROLE} LOGIN")
            # From version 16 on, who creates a role is its administrator and must make itself a member.
            await connection.exec_driver_sql(f"GRANT {READER_ROLE} TO CURRENT_USER")
            await connection.exec_driver_sql(f"GRANT SELECT ON {', '.join(tables)} TO {READER_ROLE}")
        return True
    except StoreUnavailableError as error:  # so is a missing privilege reported, too
        _LOG.info("no role for readers; their transactions are read-only all the same", reason=str(error))
        return False


def reader_url(url: str) -> str:
    """Return the URL with which a reader logs in to the store at `url`: the one that the user has set, if any."""
    own = os.environ.get(READER_URL_VARIABLE)
    if own:
        return own
    return make_url(async_url(url)).set(username=READER_ROLE, password="").render_as_string(hide_password=False)


async def is_confined(connection: AsyncConnection) -> bool:
    """Return whether no statement of this session can read more than a reader may, if it takes another role, too.

    So it is if the role that has logged in is no administrator, owns nothing, is a member of no other role, and may not
    read the hidden tables."""
    found = await connection.execute(_IS_CONFINED, {"hidden": sorted(HIDDEN_TABLES)})
    return bool(found.scalar_one_or_none())


def refuses_login(error: BaseException) -> bool:
    """Return whether the server, or a pooler before it, has answered and lets this role not in."""
    answers = (one for one in error_sources(error) if isinstance(one, asyncpg.PostgresError))
    return any(str(one.sqlstate)[:2] not in ("53", "57") for one in answers)  # full, starting or shutting down


def has_refused_value(error: BaseException) -> bool:
    """Return whether a statement failed because of one of its values: asyncpg cannot encode it, or Postgres hold it."""
    for one in error_sources(error):
        if isinstance(one, asyncpg.exceptions.InterfaceError):
            return isinstance(one, ValueError)
        if str(getattr(one, "sqlstate", None) or "").startswith("22"):
            return True
    return False


class ReadOnlyStore:
    """A small pool of connections for reading, closed at the end of `async with`."""

    def __init__(
        self, url: str, pool_size: int = 2, transaction_seconds: float = _TRANSACTION_SECONDS, is_patient: bool = False
    ) -> None:
        """`transaction_seconds`: the server ends a longer transaction, from Postgres 17 on. `is_patient`: as
        Database's; it has twenty times the limit of a transaction."""
        self.database = Database(
            url, pool_size, _STATEMENT_SECONDS, _IDLE_SECONDS, is_reader=True, is_patient=is_patient
        )
        transaction_seconds *= 20 if is_patient else 1
        self._has_role = False
        limit = round(1000 * transaction_seconds)

        @event.listens_for(self.database.engine.sync_engine, "connect")
        def set_limit(connection: DBAPIConnection, _: object) -> None:
            cursor = connection.cursor()
            known = "FROM pg_settings WHERE name = 'transaction_timeout'"  # before Postgres 17 it is not
            cursor.execute(f"SELECT set_config(name, '{limit}', false) {known}")
            cursor.execute("SET default_transaction_isolation = 'repeatable read'")
            cursor.close()
            connection.commit()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that can only read, and sees one state of the store. Raises StoreUnavailableError as
        `Database.begin` does, also for a statement that takes longer than the limit."""
        async with self.database.begin() as connection:
            if not self._has_role:  # asked again each time, because a viewer may start before `ratchet up` migrates
                await connection.execute(_BEGIN)
                self._has_role = bool((await connection.execute(_MAY_USE, {"role": READER_ROLE})).scalar_one())
            if self._has_role:
                await connection.execute(_BEGIN_AS_READER, {"role": READER_ROLE})
            yield connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.database.close()
