"""Numbers within JSON columns, read such that one row cannot fail a statement over all rows."""

from typing import Any

from sqlalchemy import ColumnElement, Integer, Numeric, case, cast

from ratchet.bounded_numbers import LARGEST_INTEGER


def integer_of(part: ColumnElement[Any]) -> ColumnElement[int]:
    """Return a number of a JSON column as an integer, NULL if it is missing.

    One beyond Postgres' integers becomes the largest or smallest of them: earlier versions stored such numbers, and a
    plain cast would then fail for every run.
    """
    number = cast(part.astext, Numeric)
    within = case(
        (number > LARGEST_INTEGER, LARGEST_INTEGER), (number < -LARGEST_INTEGER, -LARGEST_INTEGER), else_=number
    )
    return cast(within, Integer)
