"""Parts that many queries have: the columns of a record, one record, times as seconds, and a number of rows."""

from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Float, Label, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

_R = TypeVar("_R")


def columns_of(record: Any, table: Any, **other: Any) -> list[Label[Any]]:
    """Return one column for each field of `record`, a dataclass or a NamedTuple, in order: `record(*row)` reads a row.

    It is the table's column of the field's name, or the expression in `other`.
    """
    return [(other[name] if name in other else getattr(table, name)).label(name) for name in record.__match_args__]


async def read_one(connection: AsyncConnection, record: type[_R], statement: Select[*tuple[Any, ...]]) -> _R | None:
    """Return the one row of a statement whose columns have the names of the record's fields; None without a row."""
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else record(**row._mapping)


def seconds_of(time: Any) -> Any:
    """Return an expression for an interval in seconds, or for a time in seconds since the epoch, as a float."""
    return func.date_part("epoch", time, type_=Float(53))


def seconds_since(time: Any) -> ColumnElement[float]:
    """Return an expression for the seconds since a heartbeat. One that is ahead was written before the server's clock
    was set back; its distance counts, so that it does not hide a silence until the clock has caught up."""
    return func.abs(seconds_of(func.now() - time), type_=Float(53))


async def count_rows(connection: AsyncConnection, *conditions: ColumnElement[bool]) -> int:
    """Return the number of rows of the one table that these conditions name."""
    return int((await connection.execute(select(func.count()).where(*conditions))).scalar_one())
