"""Output of commands: progress on stderr, results on stdout, JSON on request.

All commands print through these functions, so that `--json` output is never mixed with progress.
"""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import orjson
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_GAP = 2
"""Spaces between two columns of a table."""

# `make train` sets RATCHET_STARTED (seconds since the epoch), so that its commands share one clock.
_STARTED = float(os.environ.get("RATCHET_STARTED") or time.time())


def say(text: str) -> None:
    """Print one line of progress to stderr, with the seconds since the command, or its `make train`, began."""
    print(f"[{time.time() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE, default=str))
    sys.stdout.flush()


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print one line per row. The last column is cut to the width of the terminal; ids and numbers never are.

    If stdout is not a terminal, nothing is cut.
    """
    console = Console()
    widths = [
        max(map(cell_len, (column, *cells))) for column, *cells in zip(columns, *map(_one_line, rows), strict=True)
    ]
    full = sum(widths) + _GAP * (len(widths) - 1)
    table = Table(
        title=title, title_justify="left", title_style="italic", box=None, pad_edge=False, padding=(0, _GAP, 0, 0)
    )
    for column, width in zip(columns[:-1], widths, strict=False):
        table.add_column(column, no_wrap=True, min_width=width)
    last = max(len(columns[-1]), console.width - (full - widths[-1])) if console.is_terminal else widths[-1]
    table.add_column(columns[-1], no_wrap=True, overflow="ellipsis", width=min(last, widths[-1]))
    for row in rows:
        table.add_row(*map(Text, _one_line(row)))
    console.width = max(console.width, full)
    console.print(table, soft_wrap=True)


def _one_line(row: list[str]) -> list[str]:
    return [" ".join(cell.split()) for cell in row]


def duration_in_words(seconds: float) -> str:
    """Return a duration in its largest fitting unit, for a narrow column of a table."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} d"


def answered_by(endpoint: Mapping[str, Any]) -> str:
    """Return, as the rest of a sentence, which endpoint answers in place of the policy, and what is missing then."""
    return (
        f"answered by {endpoint['model']} at {endpoint['url']}: no tokens are captured, so nothing of it can be trained"
    )
