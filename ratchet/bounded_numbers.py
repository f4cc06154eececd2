"""Numbers that people give, with the bounds of the columns and casts that they reach.

A number without bounds is accepted by Python and refused by Postgres: for the run that has it, or for every run if a
statement reads the numbers of all runs.
"""

from typing import Annotated

from pydantic import Field

LARGEST_INTEGER = 2**31 - 1
"""The largest value of a Postgres `integer`."""
MAX_ROWS = 1_000_000
"""Most rows of one list: a larger one does not fit in memory beside others."""
ADVICE_STEPS = 5
"""The newest trained steps whose hours are told if no number is asked for: all rows of their rollouts are read."""

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0, le=LARGEST_INTEGER)]
NotNegative = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
RowId = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A duration of at most 31 years: several of them can be added to a date, and to each other."""
