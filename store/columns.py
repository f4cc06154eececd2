"""The columns of a query by the fields of the record that its rows become, and times as numbers of seconds."""

from typing import Any

from sqlalchemy import Float, Label, func


def columns_of(record: Any, table: Any, **other: Any) -> list[Label[Any]]:
    """Return one column for each field of `record`, a dataclass or a NamedTuple, in order: `record(*row)` reads a row.

    It is the table's column of the field's name, or the expression in `other`.
    """
    return [(other[name] if name in other else getattr(table, name)).label(name) for name in record.__match_args__]


def seconds_of(time: Any) -> Any:
    """Return an expression for an interval in seconds, or for a time in seconds since the epoch, as a float."""
    return func.date_part("epoch", time, type_=Float(53))
