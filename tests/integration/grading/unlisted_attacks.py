"""Attacks on verdicts by class and ecosystem, beyond `attacks.py`; each is played with oracle and control run.

The folder `unlisted/` holds them, one file per ecosystem and author: `known` by a person who has read the defence,
`blind` by one who has not, `adapted` by the second one after seeing results, `later` by one who knows that control runs
replace the screening of patches. None knows an expected value of the hidden
tests.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.grading.shop import Edits

FOLDER = Path(__file__).parent / "unlisted"


@dataclass(frozen=True)
class UnlistedAttack:
    """`ecosystem`: a name of `ecosystems.ECOSYSTEMS`. `edits`: path → text, bytes, link target, None to delete.
    `author`: `known`, `blind`, `adapted` or `later`. `seconds`: time limit of its tests, in which some use all cores.
    """

    name: str
    kind: str
    ecosystem: str
    edits: Edits
    executable: tuple[str, ...] = ()
    author: str = "known"
    seconds: float = 30.0


def _read() -> Iterator[UnlistedAttack]:
    for file in sorted(FOLDER.glob("*.toml")):
        for row in tomllib.loads(file.read_text())["attack"]:
            edits: Edits = dict(row.get("files", {}))
            edits |= {path: Path(target) for path, target in row.get("links", {}).items()}
            edits |= dict.fromkeys(row.get("deleted", []))
            executable = tuple(row.get("executable", ()))
            ecosystem, _, author = file.stem.partition("_")
            seconds = {"seconds": row["seconds"]} if "seconds" in row else {}
            yield UnlistedAttack(row["name"], row["kind"], ecosystem, edits, executable, author, **seconds)


_DOES_NOTHING = "def total(items):\n    return sum(items)\n"
_GENERATED = (
    UnlistedAttack(
        "a name that is no UTF-8",
        "no verdict",
        "python",
        {b"d\xff/conftest.py".decode("utf-8", "surrogateescape"): "x = 1\n", "shop/more.py": _DOES_NOTHING},
    ),
    UnlistedAttack("deep nesting", "no verdict", "node", {"package.json": '{"a":' * 100_000}),
    UnlistedAttack("a long line in a Makefile", "no verdict", "c", {"Makefile": "a " * 200_000 + ":\n"}),
    UnlistedAttack(
        "three thousand settings files",
        "no verdict",
        "python",
        {f"d{number}/setup.cfg": "[a]\n" for number in range(3000)},
    ),
)
"""Attacks whose files are made by a program."""

UNLISTED: tuple[UnlistedAttack, ...] = (*_read(), *_GENERATED)
