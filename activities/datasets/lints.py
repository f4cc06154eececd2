"""What is allowed and yet rarely meant: said before a run starts.

Why here: a group of one, a temperature of 0 or a prompt that fills the context cost days before anybody sees why nothing is learned.
Called by: `ratchet tasks check`.
"""

import re
from collections.abc import Iterable
from typing import Any

from ratchet.config import RunConfig

_CHARACTERS_PER_TOKEN = 4.0
_PROMPT_SHARE = 0.5
HARNESS_PROMPT_TOKENS = {"claude_code": 12_000}
"""What an agent program sends before the task (system blocks, tool schemas), about, where it is known to be large."""
_NAMES_PYTEST = re.compile(r"\b(?:pytest|py\.test)\b")


def lint_config(config: RunConfig, longest_statement: int = 0) -> list[str]:
    """`longest_statement` in characters."""
    said = []
    sampling = config.sampling
    if sampling.temperature < 0.05:
        said.append(
            f"sampling.temperature is {sampling.temperature:g}: all rollouts of a group are alike, so nothing is learned; use 1"
        )
    tokens = HARNESS_PROMPT_TOKENS.get(config.harness.name, 0) + longest_statement / _CHARACTERS_PER_TOKEN
    tokens += (
        len(config.harness.system_prompt or "") / _CHARACTERS_PER_TOKEN
        + len(config.harness.prompt or "") / _CHARACTERS_PER_TOKEN
    )
    if tokens > _PROMPT_SHARE * sampling.max_context_tokens:
        said.append(
            f"the first prompt takes about {tokens:.0f} of sampling.max_context_tokens ({sampling.max_context_tokens}), more than "
            f"{_PROMPT_SHARE:.0%}: little is left to work with; raise it or choose a harness with a shorter prompt"
        )
    return said


def lint_rows(rows: Iterable[dict[str, Any]]) -> list[str]:
    """About rows that are right by their form; one sentence a kind, with how many and the first."""
    found: dict[str, list[str]] = {}
    labels: set[str] = set()
    for row in rows:
        spec = row["spec"]
        if row["label"] in labels:
            found.setdefault("have a label that another row has", []).append(row["label"])
        labels.add(row["label"])
        if not spec.get("gold_patch"):
            found.setdefault("have no gold_patch, so they can never be admitted", []).append(row["label"])
        if row["grader"] == "eval_cmd" and not _NAMES_PYTEST.search(spec["eval_cmd"]):
            found.setdefault("are graded by an exit code alone, which the code under test can fake", []).append(
                row["label"]
            )
    return [f"{len(names)} rows {what}; first {names[0]}" for what, names in found.items()]
