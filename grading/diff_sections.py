"""Split a git diff into its file sections and join them again, byte for byte.

Integrity rules drop single files from a patch; the sections of the other files must not change. Any bytes can be split:
a header that git would not write gives a path that names nothing, and git refuses the patch later.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

_HEADER = b"diff --git "
_MODE = re.compile(
    rb"^(?:new file mode|new mode|deleted file mode|old mode|index [0-9a-f]+\.\.[0-9a-f]+) (\d{6})$", re.MULTILINE
)
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)', re.DOTALL)
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_LETTERS = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13}
SYMLINK = "120000"
GITLINK = "160000"
EXECUTABLE = "100755"


@dataclass(slots=True, frozen=True)
class FileChange:
    """A diff's section. `path`: bytes that are no UTF-8 as surrogate escapes. `modes`: all that the header names."""

    path: str
    raw: bytes
    added: bool
    deleted: bool
    modes: frozenset[str]

    @property
    def is_symlink(self) -> bool:
        return SYMLINK in self.modes

    @property
    def is_gone(self) -> bool:
        """True if the patch removes the file, or puts another kind of file in its place."""
        return self.deleted or len(self.modes) > 1 or self.is_symlink

    @property
    def added_text(self) -> str:
        """The lines that the section adds; empty for a binary file."""
        lines = self.raw.split(b"\n")
        return "\n".join(
            line[1:].decode(errors="replace")
            for line in lines
            if line.startswith(b"+") and not line.startswith(b"+++ ")
        )


def printable_path(path: str) -> str:
    """Return the path as text that JSON and Postgres accept: bytes that are not UTF-8, and NUL, are escaped."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return text.replace("\0", "\\x00")


def _unquote(text: bytes) -> bytes:
    """Return the C-quoted path at the start of `text`, or all of `text` if it is not quoted."""
    found = _QUOTED.match(text)
    if found is None:
        return text

    def byte(escape: re.Match[bytes]) -> bytes:
        value = escape[1]
        return (
            bytes([int(value, 8) & 0xFF])
            if value.isdigit() and value < b"8"
            else bytes([_LETTERS.get(value, value[0])])
        )

    return _ESCAPE.sub(byte, found[1])


def _path(header: bytes, extended: bytes) -> str:
    """Return P of `diff --git a/P b/P`; the sides are equal in diffs without renames. A rename gives its new path."""
    rest = header.removeprefix(_HEADER)
    renamed = re.search(rb"^(?:rename|copy) to (.*)$", extended, re.MULTILINE)
    if renamed is not None:
        return _unquote(renamed[1]).decode(errors="surrogateescape")
    side = _unquote(rest) if rest.startswith(b'"') else rest[: (len(rest) - 1) // 2]
    return side.partition(b"/")[2].decode(errors="surrogateescape")


def _change(raw: bytes) -> FileChange:
    head, _, body = raw.partition(b"\n")
    end = re.search(rb"^(?:--- |GIT binary patch|Binary files )", body, re.MULTILINE)
    extended = body[: end.start()] if end else body
    modes = frozenset(mode.decode() for mode in _MODE.findall(extended))
    added = b"\nnew file mode" in b"\n" + extended
    deleted = b"\ndeleted file mode" in b"\n" + extended
    return FileChange(_path(head, extended), raw, added, deleted, modes)


def split_diff(diff: bytes) -> list[FileChange]:
    """Return the sections in order. Content lines never start with `diff`, so that a header cannot be forged."""
    starts = [match.start() for match in re.finditer(rb"^diff --git ", diff, re.MULTILINE)]
    return [_change(diff[start:end]) for start, end in pairwise([*starts, len(diff)])]


def join_diff(changes: Iterable[FileChange]) -> bytes:
    """Return the diff with these sections; the inverse of `split_diff`."""
    return b"".join(change.raw for change in changes)
