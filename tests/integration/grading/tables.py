"""The tables of docs/reference/integrity.md, made from the rules and from the tests by `make docs`."""

from collections.abc import Sequence

from grading.integrity_rules import TAMPERED, rules_table
from tests.integration.grading.attacks import ATTACKS, Attack


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _answer(attack: Attack) -> str:
    if not attack.rule:
        return "not solved"
    return f"rejected: `{attack.rule}`" if attack.rule == TAMPERED else f"`{attack.rule}`"


def rules() -> str:
    rows = rules_table()
    return _markdown(
        list(rows[0]), [[f"`{value}`" if name == "files" else value for name, value in row.items()] for row in rows]
    )


def attacks() -> str:
    rows = [
        [str(number), one.name, ", ".join(one.graders), _answer(one)] for number, one in enumerate(ATTACKS, start=1)
    ]
    return _markdown(["", "attack", "graders", "what it gets"], rows)
