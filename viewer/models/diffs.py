"""A patch as files with coloured lines, bounded, so that a huge patch cannot make a huge page."""

from dataclasses import dataclass

MAX_LINES = 4000


@dataclass(slots=True, frozen=True)
class DiffLine:
    """`kind`: added, removed, hunk or context."""

    kind: str
    text: str


@dataclass(slots=True, frozen=True)
class FileDiff:
    path: str
    lines: list[DiffLine]


@dataclass(slots=True, frozen=True)
class PatchText:
    """`num_left_out`: lines behind the limit."""

    files: list[FileDiff]
    num_left_out: int


def read_patch(text: str) -> PatchText:
    """Split a git diff or a unified diff into files. Text before the first file is one without a path."""
    lines = text.splitlines()
    files: list[FileDiff] = []
    for line in lines[:MAX_LINES]:
        if line.startswith("diff --git "):
            files.append(FileDiff(line.rpartition(" b/")[2], []))
            continue
        if not files:
            files.append(FileDiff("", []))
        files[-1].lines.append(DiffLine(_kind(line), line))
    return PatchText(files, max(0, len(lines) - MAX_LINES))


def _kind(line: str) -> str:
    if line.startswith(("+++", "---")):
        return "head"
    return {"+": "added", "-": "removed", "@": "hunk"}.get(line[:1], "context")
