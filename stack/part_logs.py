"""The newest error in a part's log, as one line that fits into a table or a sentence."""

import re
from pathlib import Path
from typing import Any

from ratchet.logs import json_object, text_line
from ratchet.secrets import without_secrets

_TAIL_BYTES = 64 << 10
_MAX_CHARS = 300
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_SENTENCE = re.compile(r"^(ratchet|temporal-server|panic): |^[\w.]*(Error|Exception)\b|\b(FATAL|PANIC)\b")
"""The end of a traceback, a command's error, a Postgres or Go process that cannot go on."""
_ERROR = re.compile(r"\berror\b|[a-z]Error\b", re.IGNORECASE)
_NO_ERROR = re.compile(r"\b(DEBUG|INFO|WARN|WARNING)\b|\[(debug|info|warning) *\]|\b(warn|info)\t")
"""A level below error; such lines often name one."""


def log_size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def last_error(log: Path, start: int = 0) -> str:
    """Return the last line of the log's end that is an error, else the last that names one; empty without any.

    `start`: the byte behind which lines count; all of them do if the log has become shorter (it was rotated).
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start if start <= size else 0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [_short(line) for line in text.splitlines()]
    lines = [line for line in lines if not _NO_ERROR.search(line)]
    found = next((line for pattern in (_SENTENCE, _ERROR) for line in reversed(lines) if pattern.search(line)), "")
    return without_secrets(" ".join(found.split()))[:_MAX_CHARS]


def readable(line: str) -> str:
    """Return a line in JSON (RATCHET_LOG_FORMAT) as text, and any other line as it is."""
    fields = _fields(line)
    return line if fields is None else text_line(fields)


def _fields(line: str) -> dict[str, Any] | None:
    """Return the fields of a line that a part has written in JSON, None for any other line."""
    fields = json_object(line)
    return fields if fields is not None and "event" in fields and "level" in fields else None


def _short(line: str) -> str:
    """Return a line without colours; of an error in JSON, what has failed."""
    fields = _fields(line)
    if fields is None:
        return _COLOURS.sub("", line).strip()
    if fields["level"] not in ("error", "critical"):
        return text_line(fields)
    text = str(fields.get("exception", "")).strip().rpartition("\n")[2] or str(fields["event"])
    return text if _SENTENCE.search(text) else f"Error: {text}"
