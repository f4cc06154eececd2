"""The newest error in a part's log, as one line that fits into a table or a sentence."""

import re
from pathlib import Path

_TAIL_BYTES = 64 << 10
_MAX_CHARS = 300
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_SENTENCE = re.compile(r"^(ratchet|temporal-server|panic): |^[\w.]*(Error|Exception)\b|\b(FATAL|PANIC)\b")
"""The end of a traceback, a command's error, a Postgres or Go process that cannot go on."""
_ERROR = re.compile(r"\berror\b|[a-z]Error\b", re.IGNORECASE)
_NO_ERROR = re.compile(r"\b(DEBUG|INFO|WARN|WARNING)\b|\[(debug|info|warning) *\]|\b(warn|info)\t")
"""A level below error; such lines often name one."""
_PASSWORD = re.compile(r"(\w+://[^\s:/@]*):[^\s@]+@")


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
    lines = [_COLOURS.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if not _NO_ERROR.search(line)]
    found = next((line for pattern in (_SENTENCE, _ERROR) for line in reversed(lines) if pattern.search(line)), "")
    return without_password(" ".join(found.split()))[:_MAX_CHARS]


def without_password(text: str) -> str:
    """Return the text with the password of every URL left out."""
    return _PASSWORD.sub(r"\1@", text)
