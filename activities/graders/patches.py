"""A git diff as its file sections: read, filtered, joined again, byte for byte.

Why here: integrity rules speak about files, and a patch must lose single files without losing a byte of the others.
Called by: `activities/graders/integrity.py`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

_HEADER = b"diff --git "
_MODE = re.compile(
    rb"^(?:new file mode|new mode|deleted file mode|old mode|index [0-9a-f]+\.\.[0-9a-f]+) (\d{6})$", re.MULTILINE
)
_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
SYMLINK, GITLINK = "120000", "160000"


@dataclass(slots=True, frozen=True)
class FileChange:
    """One section of a diff. `modes`: every file mode its header names. `raw` is the section as it stands."""

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
        """The lines that the section adds; empty for a binary one."""
        lines = self.raw.split(b"\n")
        return "\n".join(
            line[1:].decode(errors="replace")
            for line in lines
            if line.startswith(b"+") and not line.startswith(b"+++ ")
        )


def _unquote(text: bytes) -> tuple[str, bytes]:
    """A C-quoted path at the start of `text`, and what follows it."""
    out, at = bytearray(), 1
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
    return out.decode(errors="surrogateescape"), text[at + 1 :]


def _path(header: bytes) -> str:
    """The path in `diff --git a/P b/P`; both sides name the same file, because diffs are taken without renames."""
    rest = header.removeprefix(_HEADER)
    if rest.startswith(b'"'):
        return _unquote(rest)[0].partition("/")[2]
    half = rest[: (len(rest) - 1) // 2]
    return half.decode(errors="surrogateescape").partition("/")[2]


def _change(raw: bytes) -> FileChange:
    head, _, body = raw.partition(b"\n")
    end = re.search(rb"^(?:--- |GIT binary patch|Binary files )", body, re.MULTILINE)
    extended = body[: end.start()] if end else body
    modes = frozenset(mode.decode() for mode in _MODE.findall(extended))
    added, deleted = b"\nnew file mode" in b"\n" + extended, b"\ndeleted file mode" in b"\n" + extended
    return FileChange(_path(head), raw, added, deleted, modes)


def split(diff: bytes) -> list[FileChange]:
    """The sections in order; `join` of them is the diff. A line of content never starts with `diff`, so headers cannot be forged."""
    starts = [match.start() for match in re.finditer(rb"^diff --git ", diff, re.MULTILINE)]
    return [_change(diff[start:end]) for start, end in pairwise([*starts, len(diff)])]


def join(changes: Iterable[FileChange]) -> bytes:
    return b"".join(change.raw for change in changes)
