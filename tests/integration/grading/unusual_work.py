"""Honest solutions that need settings, files or names that runners read, in several ecosystems.

The folder `unusual/` holds them, one file per ecosystem. Each solves the task of `ecosystems.py`.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.integration.grading.ecosystems import ECOSYSTEMS, Ecosystem
from tests.integration.grading.shop import Edits

FOLDER = Path(__file__).parent / "unusual"


@dataclass(frozen=True)
class UnusualWork:
    """`base`: files that the repository has in addition. `command`: the task's test command, if it is another one."""

    name: str
    ecosystem: str
    edits: Edits
    executable: tuple[str, ...] = ()
    base: dict[str, str] = field(default_factory=dict)
    command: str = ""

    def task_of(self) -> Ecosystem:
        """Return the ecosystem with this work's base and command."""
        ecosystem = ECOSYSTEMS[self.ecosystem]
        base = {**ecosystem.base, **self.base}
        return replace(ecosystem, base=base, command=self.command or ecosystem.command)


def _read() -> Iterator[UnusualWork]:
    for file in sorted(FOLDER.glob("*.toml")):
        for row in tomllib.loads(file.read_text())["honest"]:
            edits: Edits = dict(row.get("files", {}))
            edits |= {path: Path(target) for path, target in row.get("links", {}).items()}
            edits |= dict.fromkeys(row.get("deleted", []))
            yield UnusualWork(
                row["name"],
                file.stem,
                edits,
                tuple(row.get("executable", ())),
                row.get("base", {}),
                row.get("command", ""),
            )


UNUSUAL_WORK: tuple[UnusualWork, ...] = tuple(_read())
