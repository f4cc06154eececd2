"""Attacks on verdicts by class and ecosystem, beyond `attacks.py`. Each is played with oracle and control run."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class UnlistedAttack:
    """`ecosystem`: a name of `ecosystems.ECOSYSTEMS`. `edits`: path → text, bytes, link target, None to delete."""

    name: str
    kind: str
    ecosystem: str
    edits: "dict[str, str | bytes | Path | None]"
    executable: tuple[str, ...] = ()


UNLISTED: tuple[UnlistedAttack, ...] = ()
