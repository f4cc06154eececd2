"""Parts that many queries have: the columns of a record, times as numbers of seconds, and a number of rows."""

from typing import Any

from sqlalchemy import ColumnElement, Float, Label, func, select
from sqlalchemy.ext.asyncio import AsyncConnection


def columns_of(record: Any, table: Any, **other: Any) -> list[Label[Any]]:
    """Return one column for each field of `record`, a dataclass or a NamedTuple, in order: `record(*row)` reads a row.

    It is the table's column of the field's name, or the expression in `other`.
    """
    return [(other[name] if name in other else getattr(table, name)).label(name) for name in record.__match_args__]


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
