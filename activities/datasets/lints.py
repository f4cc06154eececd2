"""Warnings about configs and rows that are valid but rarely intended, such as a temperature near 0.

`ratchet tasks check` prints them, before a run spends days on them; `box_lints.py` has those that need a box.
"""

import re
from collections.abc import Iterable, Iterator

from activities.datasets.archives import read_packed
from grading.eval_cmd import names_pytest
from grading.reward_file import HARBOR
from ratchet.config import RunConfig
from ratchet.types import JsonObject
from store.tasks import TaskFields

_CHARACTERS_PER_TOKEN = 4.0
_PROMPT_SHARE = 0.5
HARNESS_PROMPT_TOKENS = {"claude_code": 12_000}
"""Approximate tokens that an agent program sends before the task (system prompt, tool schemas), if they are many."""
_NEEDS_NETWORK = re.compile(
    r"\b(?:uvx|uv (?:pip|run|sync|tool)|curl|wget|apt(?:-get)?|pip3? install|npx|npm (?:ci|i|install)|git clone)\b"
)


def lint_config(config: RunConfig, longest_statement: int = 0) -> list[str]:
    """Return warnings about a config. `longest_statement`: length of the longest problem statement, in characters."""
    warnings = []
    sampling = config.sampling
    if sampling.temperature < 0.05:
        warnings.append(
            f"sampling.temperature is {sampling.temperature:g}: all rollouts of a group are alike, "
            "so nothing is learned; use 1"
        )
    tokens = HARNESS_PROMPT_TOKENS.get(config.harness.name, 0) + longest_statement / _CHARACTERS_PER_TOKEN
    tokens += (
        len(config.harness.system_prompt or "") / _CHARACTERS_PER_TOKEN
        + len(config.harness.prompt or "") / _CHARACTERS_PER_TOKEN
    )
    if tokens > _PROMPT_SHARE * sampling.max_context_tokens:
        warnings.append(
            f"the first prompt takes about {tokens:.0f} of sampling.max_context_tokens "
            f"({sampling.max_context_tokens}), more than {_PROMPT_SHARE:.0%}: little is left to work with; "
            "raise it or choose a harness with a shorter prompt"
        )
    return warnings


def lint_rows(rows: Iterable[TaskFields]) -> list[str]:
    """Return warnings about valid rows: one sentence per kind, with their number and the first label."""
    found: dict[str, list[str]] = {}
    labels: set[str] = set()
    for row in rows:
        spec = row["spec"]
        if row["label"] in labels:
            found.setdefault("have a label that another row has", []).append(row["label"])
        labels.add(row["label"])
        if not spec.get("gold_patch"):
            found.setdefault("have no gold_patch, so they can never be admitted", []).append(row["label"])
        if row["grader"] == "eval_cmd":
            for what in _lint_command(spec):
                found.setdefault(what, []).append(row["label"])
    return [f"{len(names)} rows {what}; first {names[0]}" for what, names in found.items()]


def _lint_command(spec: JsonObject) -> Iterator[str]:
    command = str(spec["eval_cmd"])
    is_harbor = spec.get("verifier") == HARBOR
    if is_harbor:
        command = read_packed(spec["tests_archive"], "tests/test.sh")
    if not names_pytest(command):
        evidence = "a reward file" if is_harbor else "an exit code"
        yield f"are graded by {evidence} alone, which the code under test can fake"
    if not (names_pytest(command) or is_harbor or spec.get("empty_patch_fails")):
        yield (
            "give no verdict until they are admitted, if their command prints no line of a known runner; "
            "`empty_patch_fails: true` says that it fails without a solution"
        )
    if is_harbor and (needed := _NEEDS_NETWORK.search(command)):
        yield (
            f"have a tests/test.sh that calls `{needed[0]}`, and grading boxes have no network; "
            "use an image that has what the script needs"
        )
