"""Honest solutions that are unusual, in several ecosystems. Each solves the task of `ecosystems.py`.

The folder `unusual/` holds those that need settings, files or names that runners read, `honest/` those whose code does
what takeovers do, too; one file per ecosystem.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.integration.grading.ecosystems import ECOSYSTEMS, Ecosystem
from tests.integration.grading.shop import Edits


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


def _read(folder: str) -> Iterator[UnusualWork]:
    for file in sorted((Path(__file__).parent / folder).glob("*.toml")):
        for row in tomllib.loads(file.read_text())["honest"]:
            edits: Edits = {} if folder == "unusual" else dict(ECOSYSTEMS[file.stem].gold)
            if "code" in row:  # lines behind the solution in its file
                (path,) = edits
                edits[path] = f"{edits[path]}\n\n{row['code']}"
            edits |= row.get("files", {})
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


UNUSUAL_WORK: tuple[UnusualWork, ...] = tuple(_read("unusual"))
HONEST_CODE: tuple[UnusualWork, ...] = tuple(_read("honest"))
FLAGGED = (
    "a test script that loads a setup",
    "a profiler for developers",
    "amounts that are equal within a tolerance",
    "a tool that reads tests of other projects",
    "settings that are a Python file",
)
"""Works that have a flag nevertheless."""
