"""Receivers of progress lines, so that what reports progress does not depend on the terminal."""

from collections.abc import Callable

ReportProgress = Callable[[str], None]
"""Receives one line of progress for a person; it returns at once and raises nothing."""


class CountedLine(str):
    """A line that also says how much of `what` is done, so that a terminal can draw a bar and estimate the rest.

    `done` and `total` have the same unit, such as updates or packages. Equal `what` continue the same bar.
    """

    what: str
    done: int
    total: int

    def __new__(cls, text: str, what: str, done: int, total: int) -> "CountedLine":
        line = super().__new__(cls, text)
        line.what = what
        line.done = done
        line.total = total
        return line
