"""One SELECT of a person or a program: read-only, ended after 4 seconds.

It runs in a session that has logged in as a reader: of a session that has only taken the role, a SELECT can give it
back by `set_config`, and then end the stack's sessions or read the server's files.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError, StoreUnavailableError
from ratchet.suggestions import did_you_mean
from reads.reader_role import (
    HIDDEN_TABLES,
    READER_ROLE,
    READER_URL_VARIABLE,
    ReadOnlyStore,
    is_confined,
    reader_url,
    refuses_login,
)
from store.schema import Base

LIMIT_SECONDS = 4
_TIMED_OUT = "57014"
_UNKNOWN = re.compile(r'(relation|column) "?([\w.]+)"? does not exist')


@dataclass(slots=True)
class SqlResult:
    """The names of the columns, and the rows."""

    columns: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)


class NoReaderError(ConfigError):
    """The server has no login that can only read."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"SQL needs a session that can only read, and there is none: {reason}. `ratchet up` lets {READER_ROLE} log "
            f"in to the embedded Postgres; for another server, set {READER_URL_VARIABLE} to the URL of a role that may "
            "only SELECT, is a member of no other role, and may not read session_token"
        )


@dataclass(slots=True, frozen=True)
class TableDescription:
    """A table that may be read. `what`: what one of its rows is."""

    name: str
    what: str
    columns: list[str]


async def read_sql_as_reader(url: str, query: str) -> SqlResult:
    """Do what `read_sql` does, in a session of a reader. Raises NoReaderError if the store at `url` has none."""
    async with ReadOnlyStore(reader_url(url), 1, is_patient=True) as store:
        try:
            async with store.read() as connection:
                if not await is_confined(connection):
                    raise NoReaderError("its role may do more than a reader")
        except StoreUnavailableError as error:
            if refuses_login(error):
                raise NoReaderError(str(error)) from None
            raise
        async with store.read() as connection:
            return await read_sql(connection, query)


async def read_sql(connection: AsyncConnection, query: str) -> SqlResult:
    """Return all rows. Raises ConfigError with Postgres' message for a wrong query."""
    try:
        await connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{LIMIT_SECONDS} s'")
        result = await connection.exec_driver_sql(query)
        return SqlResult(list(result.keys()), [tuple(row) for row in result]) if result.returns_rows else SqlResult()
    except DBAPIError as error:
        cause = error.orig
        state = str(getattr(cause, "sqlstate", None))
        if state < "53" or state == _TIMED_OUT:  # from class 53 on, the server itself has failed
            said = str(cause).rpartition(">: ")[2]
            raise ConfigError(f"Postgres refuses the query: {said}{_nearest(said)}") from None
        raise


def _nearest(said: str) -> str:
    """Return the name of a table or column that Postgres may have been asked for, if it knows no such one."""
    if (unknown := _UNKNOWN.match(said)) is None:
        return ""
    tables = describe_tables()
    if unknown[1] == "relation":
        return did_you_mean(unknown[2], [one.name for one in tables]) or "; `ratchet sql` lists the tables"
    return did_you_mean(unknown[2].rpartition(".")[2], {name for one in tables for name in one.columns})


def describe_tables() -> list[TableDescription]:
    """Return the tables that readers may see, with the first sentence of each description."""
    found = []
    for mapper in Base.registry.mappers:
        name = str(mapper.class_.__tablename__)
        if name not in HIDDEN_TABLES:
            what = " ".join((mapper.class_.__doc__ or "").split()).split(". ")[0].rstrip(".") + "."
            found.append(TableDescription(name, what, [column.name for column in mapper.columns]))
    return sorted(found, key=lambda one: one.name)
