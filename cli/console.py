"""Output of commands: progress on stderr, results on stdout, JSON on request.

All commands print through these functions, so that `--json` output is never mixed with progress.
"""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

# `make train` sets RATCHET_STARTED (seconds since the epoch), so that its commands share one clock.
_STARTED = float(os.environ.get("RATCHET_STARTED") or time.time())


def say(text: str) -> None:
    """Print one line of progress to stderr, with the seconds since the command, or its `make train`, began."""
    print(f"[{time.time() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE, default=str))
    sys.stdout.flush()


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


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
