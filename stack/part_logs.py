"""The logs of the parts: the first error as one line that fits into a sentence, and each new line as it comes."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.logs import json_object, text_line
from ratchet.secrets import without_secrets

_HEAD_BYTES = 1 << 20
_LINE_BYTES = 64 << 10
_LOOK_SECONDS = 0.5
_MAX_CHARS = 300
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FOR_A_PERSON = re.compile(r"\b(ConfigError|MachineError|DatasetError)\b")
"""An error that a person must mend; the restarts that follow find the same."""
_LAST_WORDS = re.compile(r"^(ratchet|temporal-server|panic): (?!.* is waited for$)")
"""With these a command or a Go process says why it ends."""
_SENTENCE = re.compile(r"^[\w.]*(Error|Exception)\b|\b(FATAL|PANIC)\b")
"""The end of a traceback, a Postgres that cannot go on."""
_ERROR = re.compile(r"\berror\b|[a-z]Error\b", re.IGNORECASE)
_NO_ERROR = re.compile(
    r"(\([^)]*\)\s*|\S*\d\S*\s+|[A-Z]{3,4}\s+){0,6}((DEBUG|INFO|WARN(ING)?)\b|\[(debug|info|warning) *\]|(warn|info)\s)"
)
"""A level below error behind times, processes and a time zone; such lines often name an error."""
_HEAD_CHARS = 100
POSTGRES_LINE = "%m [%p] %qclient "
"""log_line_prefix of the stack's own Postgres: what a session says is marked, and what the server says is not."""
_OF_A_CLIENT = re.compile(r"^\t|^\S+ \S+ \S+ \[\d+\] client ")
"""A line of Postgres about a session, or the rest of its statement."""


def log_size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def first_error(log: Path, start: int = 0) -> str:
    """Return why the process says that it ends, else the first error that a person must mend, else the first line that
    is an error, else the first that names one; empty without any. Errors of the part's clients do not count.

    `start`: the byte behind which lines count; all of them do if the log has become shorter (it was rotated).
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(start if start <= size else 0)
            head = file.read(_HEAD_BYTES)  # and the end, of a log that is longer
            file.seek(max(file.tell(), size - _LINE_BYTES))
            text = (head + file.read()).decode(errors="replace")
    except OSError:
        return ""
    lines = [_short(line) for line in text.splitlines() if not _OF_A_CLIENT.search(line)]
    lines = [line for line in lines if not _NO_ERROR.match(line[:_HEAD_CHARS])]
    patterns = (_LAST_WORDS, FOR_A_PERSON, _SENTENCE, _ERROR)
    found = next((line for pattern in patterns for line in lines if pattern.search(line)), "")
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
    return text if _LAST_WORDS.search(text) or _SENTENCE.search(text) else f"Error: {text}"


@contextlib.contextmanager
def following_logs(directory: Path, write: Callable[[str, str], None]) -> Iterator[None]:
    """Give `write` the part and the text of each line that is added to a log of the directory during the block."""
    ends = {path: log_size(path) for path in directory.glob("*.log")}
    ended = threading.Event()

    def follow() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(_LOOK_SECONDS)
            for path in directory.glob("*.log"):
                with contextlib.suppress(OSError):  # a log that goes away, or no space left; the next look goes on
                    ends[path] = _give_lines(path, ends.get(path, 0), partial(write, path.stem))

    follower = threading.Thread(target=follow, name="logs", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _give_lines(path: Path, start: int, write: Callable[[str], None]) -> int:
    """Give the lines from the byte `start` on; return the byte behind the last whole one."""
    if path.stat().st_size < start:  # supervisord has rotated it
        _give_lines(path.with_name(f"{path.name}.1"), start, write)
        start = 0
    with path.open("rb") as file:
        file.seek(start)
        while (line := file.readline(_LINE_BYTES)).endswith(b"\n") or len(line) == _LINE_BYTES:
            start = file.tell()
            if text := readable(_COLOURS.sub("", line.decode(errors="replace")).rstrip()):
                write(text)
    return start
