"""Receivers of progress lines, so that what reports progress does not depend on the terminal."""

from collections.abc import Callable

ReportProgress = Callable[[str], None]
"""Receives one line of progress for a person; it returns at once and raises nothing."""


class CountedLine(str):
    """A line that also says how much of `what` is done, so that a terminal can draw a bar and estimate the rest.

    `done` and `total` have the same unit, such as updates or packages. Equal `what` continue the same bar.
    `seconds_left`: an estimate in place of that from the pace of the lines.
    """

    what: str
    done: int
    total: int
    seconds_left: float | None

    def __new__(cls, text: str, what: str, done: int, total: int, seconds_left: float | None = None) -> "CountedLine":
        line = super().__new__(cls, text)
        line.what = what
        line.done = done
        line.total = total
        line.seconds_left = seconds_left
        return line
