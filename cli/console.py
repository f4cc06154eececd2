"""Output of commands: progress on stderr, results on stdout, JSON on request.

All commands print through these functions, so that `--json` output is never mixed with progress.
"""

import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import orjson
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ratchet.durations import duration_in_words
from ratchet.progress import CountedLine

if TYPE_CHECKING:
    from cli.progress_bar import ProgressBar

_GAP = 2
"""Spaces between two columns of a table."""

_INDENT = 4
"""Spaces before a line that belongs to the row above."""

_LINE_SECONDS = 60.0

_SHORTEST_CUT = 12
"""Characters of the last column that must be left of it; otherwise it follows below."""


# `make train` sets RATCHET_STARTED (seconds since the epoch), so that its commands share one clock.
def _started_at() -> float:
    try:
        return float(os.environ.get("RATCHET_STARTED") or time.time())
    except ValueError:  # which only shows in the seconds of progress
        return time.time()


_STARTED = _started_at()


def say(text: str) -> None:
    """Print one line of progress to stderr, with the seconds since the command, or its `make train`, began.

    Lines that say how much is done move a bar in a terminal; elsewhere, one a minute is printed, with an estimate.
    """
    elapsed = f"[{time.time() - _STARTED:6.1f} s]"
    if not sys.stderr.isatty():
        if estimate := _PACE.line(text, time.time()) if isinstance(text, CountedLine) else text:
            print(elapsed, estimate, file=sys.stderr, flush=True)
    elif isinstance(text, CountedLine):
        _bar().show(text, elapsed, _PACE.estimate(text, time.time()))
    else:
        _bar().print_above(f"{elapsed} {text}")


class _Pace:
    """Picks the lines to print without a terminal, and estimates the rest of the work from its pace so far."""

    def __init__(self) -> None:
        self._what = ""
        self._began = (0.0, 0)
        self._printed_at = 0.0

    def estimate(self, text: CountedLine, now: float) -> str:
        """Return the end of a line that says how long the rest takes; empty if that is not known."""
        if text.what != self._what:
            self._what = text.what
            self._began = (now, text.done)
        num_done, left = text.done - self._began[1], text.seconds_left
        if left is None and 0 < num_done < text.total - self._began[1]:
            left = (text.total - text.done) * (now - self._began[0]) / num_done
        return f"; about {duration_in_words(left)} left" if left and text.done < text.total else ""

    def line(self, text: CountedLine, now: float) -> str:
        """Return the line to print at this time, empty if the last one is less than a minute old."""
        is_new = text.what != self._what
        estimate = self.estimate(text, now)
        if not is_new and text.done < text.total and now - self._printed_at < _LINE_SECONDS:
            return ""
        self._printed_at = now
        return f"{text}{estimate}"


_PACE = _Pace()


@cache
def _bar() -> "ProgressBar":
    from cli.progress_bar import ProgressBar

    return ProgressBar(Console(stderr=True))


def print_json(value: Any) -> None:
    """Print a value as JSON. Keys become strings: those of a subquery's columns are of a subclass of str."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    sys.stdout.buffer.write(orjson.dumps(value, option=options, default=str))
    sys.stdout.flush()


def print_table(title: str, columns: list[str], rows: list[list[str]], *, breaks_last: bool = False) -> None:
    """Print a table that fits the terminal; ids and numbers are never cut.

    Titles break between words, and the last column is cut, or breaks over lines with `breaks_last`. Columns that do
    not fit even then follow below each row, with their titles. If stdout is not a terminal, nothing is cut or moved.
    """
    console = Console()
    rows = [[" ".join(cell.split()) for cell in row] for row in rows]
    cell_widths = [max((cell_len(cell) for cell in cells), default=0) for cells in zip(*rows, strict=True)] or [
        0
    ] * len(columns)
    titles = [
        textwrap.wrap(column, max(width, *map(len, column.split()))) if console.is_terminal and column else [column]
        for column, width in zip(columns, cell_widths, strict=True)
    ]
    widths = [max(width, *map(cell_len, lines)) for width, lines in zip(cell_widths, titles, strict=True)]
    shown = len(columns)
    if console.is_terminal:
        room = console.width - _width(widths[:-1]) - _GAP
        if room >= min(widths[-1], max(len(columns[-1]), _SHORTEST_CUT)):
            widths[-1] = min(widths[-1], room)
        else:
            shown = max(1, *(count for count in range(len(widths)) if _width(widths[:count]) <= console.width))
    print_line = partial(console.print, soft_wrap=True, markup=False, highlight=False)
    print_line(Text(title, style="italic"))
    for words in zip_longest(*titles[:shown], fillvalue=""):
        print_line(Text(_padded(words, widths), style="bold"))
    for row in rows:
        *others, last = row[:shown]
        breaks = breaks_last and shown == len(columns)
        for line in (textwrap.wrap(last, max(1, widths[-1])) if breaks else []) or [last]:
            print_line(_padded([*others, line], widths))
            others = [""] * len(others)
        below = "; ".join(f"{name} {cell}" for name, cell in zip(columns[shown:], row[shown:], strict=True) if cell)
        for line in textwrap.wrap(below, max(_SHORTEST_CUT, console.width - _INDENT)):
            print_line(" " * _INDENT + line)


def print_found(
    found: Any, as_json: bool, title: str, columns: list[str], rows: list[list[str]], *, breaks_last: bool = False
) -> None:
    """Print what was found as JSON if that is asked for, else `rows` of it as a table."""
    print_json(found) if as_json else print_table(title, columns, rows, breaks_last=breaks_last)


def _width(widths: list[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _padded(cells: Sequence[str], widths: list[int]) -> str:
    """Return the cells side by side, the last one cut to its width."""
    padded = [cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=False)]
    if cell_len(cells[-1]) > (width := widths[len(cells) - 1]):
        padded[-1] = set_cell_size(cells[-1], width - 1) + "…"
    return (" " * _GAP).join(padded).rstrip()


def answered_by(endpoint: Mapping[str, Any]) -> str:
    """Return, as the rest of a sentence, which endpoint answers in place of the policy, and what is missing then."""
    captured = "it is trained by sft only" if endpoint["tokens"] else "no tokens are captured, so it is not trained"
    return f"answered by {endpoint['model']} at {endpoint['url']}: {captured}"
