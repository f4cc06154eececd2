"""Each pattern of the rule tables matches an example made from it, and no near miss."""

import re

import pytest

from grading.integrity_rules import RULES, rules_table
from grading.path_patterns import matches_pattern

PATTERNS = [pytest.param(pattern, id=f"{rule.name}-{pattern}") for rule in RULES for pattern in rule.files]


def example(pattern: str) -> str:
    filled = re.sub(r"/\*\*$", "/deep/er", pattern.removeprefix("**/")).replace("**/", "some/where/")
    return filled.replace("*", "x").replace("?", "x")


def near_misses(pattern: str) -> list[str]:
    """Return the example with a letter more in each name that the pattern spells out."""
    names = pattern.removeprefix("**/").split("/")
    found = []
    for at, name in enumerate(names):
        if "**" in name:
            continue
        changed = name + "Q" if not name.endswith("*") else "Q" + name
        found.append(example("/".join([*names[:at], changed, *names[at + 1 :]])))
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_its_example_and_no_near_miss(pattern: str) -> None:
    assert matches_pattern(example(pattern), [pattern])
    assert matches_pattern(f"some/where/{example(pattern)}", [pattern]) == pattern.startswith("**/")
    for path in near_misses(pattern):
        assert not matches_pattern(path, [pattern]), path


def test_every_rule_says_why_and_from_where() -> None:
    assert RULES[0].name == "listed_test"
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.why and rule.source.startswith(("https://", "docs/")), rule.name
        assert rule.files or rule.applies in ("test", "data", "support", "called"), rule.name
    assert [row["rule"] for row in rules_table()] == [rule.name for rule in RULES]
