"""Split a git diff into its file sections and join them again, byte for byte.

Integrity rules drop single files from a patch; the sections of the other files must not change.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_HEADER = b"diff --git "
_MODE = re.compile(
    rb"^(?:new file mode|new mode|deleted file mode|old mode|index [0-9a-f]+\.\.[0-9a-f]+) (\d{6})$", re.MULTILINE
)
_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
SYMLINK = "120000"
GITLINK = "160000"


@dataclass(slots=True, frozen=True)
class FileChange:
    """One section of a diff. `modes`: every file mode that its header names. `raw`: the unchanged bytes of the
    section."""

    path: str
    raw: bytes
    added: bool
    deleted: bool
    modes: frozenset[str]

    @property
    def is_symlink(self) -> bool:
        return SYMLINK in self.modes

    @property
    def added_text(self) -> str:
        """The lines that the section adds; empty for a binary file."""
        lines = self.raw.split(b"\n")
        return "\n".join(
            line[1:].decode(errors="replace")
            for line in lines
            if line.startswith(b"+") and not line.startswith(b"+++ ")
        )


class _Unquoted(NamedTuple):
    path: str
    rest: bytes


def _unquote(text: bytes) -> _Unquoted:
    """Read a C-quoted path at the start of `text`."""
    out = bytearray()
    at = 1
    while text[at : at + 1] != b'"':
        if text[at : at + 1] == b"\\":
            letter = chr(text[at + 1])
            if letter.isdigit():
                out.append(int(text[at + 1 : at + 4], 8))
                at += 4
            else:
                out.append(_ESCAPES[letter])
                at += 2
        else:
            out.append(text[at])
            at += 1
    return _Unquoted(out.decode(errors="surrogateescape"), text[at + 1 :])


def _path(header: bytes) -> str:
    """Return P of `diff --git a/P b/P`; both sides are equal, because diffs are taken without renames."""
    rest = header.removeprefix(_HEADER)
    if rest.startswith(b'"'):
        return _unquote(rest).path.partition("/")[2]
    half = rest[: (len(rest) - 1) // 2]
    return half.decode(errors="surrogateescape").partition("/")[2]


def _change(raw: bytes) -> FileChange:
    head, _, body = raw.partition(b"\n")
    end = re.search(rb"^(?:--- |GIT binary patch|Binary files )", body, re.MULTILINE)
    extended = body[: end.start()] if end else body
    modes = frozenset(mode.decode() for mode in _MODE.findall(extended))
    added = b"\nnew file mode" in b"\n" + extended
    deleted = b"\ndeleted file mode" in b"\n" + extended
    return FileChange(_path(head), raw, added, deleted, modes)


def split_diff(diff: bytes) -> list[FileChange]:
    """Return the sections in order. Content lines never start with `diff`, so that a header cannot be forged."""
    starts = [match.start() for match in re.finditer(rb"^diff --git ", diff, re.MULTILINE)]
    return [_change(diff[start:end]) for start, end in pairwise([*starts, len(diff)])]


def join_diff(changes: Iterable[FileChange]) -> bytes:
    """Return the diff with these sections; the inverse of `split_diff`."""
    return b"".join(change.raw for change in changes)
