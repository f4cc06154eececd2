"""Warnings about configs and rows that are valid but rarely intended, such as a temperature near 0.

`ratchet tasks check` prints them, before a run spends days on them; `box_lints.py` has those that need a box.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator

from activities.datasets.archives import read_packed
from grading.eval_cmd import names_pytest
from grading.reward_file import HARBOR
from ratchet.built_images import is_built
from ratchet.config import RunConfig
from ratchet.types import JsonObject
from store.tasks import TaskFields

_CHARACTERS_PER_TOKEN = 4.0
_PROMPT_SHARE = 0.5
HARNESS_PROMPT_TOKENS = {"claude_code": 12_000}
"""Approximate tokens that an agent program sends before the task (system prompt, tool schemas), if they are many."""


def lint_config(config: RunConfig, longest_statement: int = 0) -> list[str]:
    """Return warnings about a config. `longest_statement`: length of the longest problem statement, in characters."""
    warnings = []
    sampling = config.sampling
    if sampling.temperature < 0.05:
        warnings.append(
            f"sampling.temperature is {sampling.temperature:g}: all rollouts of a group are alike, "
            "so nothing is learned; use 1"
        )
    num_characters = longest_statement + len(config.harness.system_prompt or "") + len(config.harness.prompt or "")
    tokens = HARNESS_PROMPT_TOKENS.get(config.harness.name, 0) + num_characters / _CHARACTERS_PER_TOKEN
    if tokens > _PROMPT_SHARE * sampling.max_context_tokens:
        warnings.append(
            f"the first prompt takes about {tokens:.0f} of sampling.max_context_tokens "
            f"({sampling.max_context_tokens}), more than {_PROMPT_SHARE:.0%}: little is left to work with; "
            "raise it or choose a harness with a shorter prompt"
        )
    return warnings


def lint_rows(rows: Iterable[TaskFields]) -> list[str]:
    """Return warnings about valid rows: one sentence per kind, with their number and the first label."""
    labels: set[str] = set()

    def lint(row: TaskFields) -> Iterator[str]:
        spec = row["spec"]
        if row["label"] in labels:
            yield "have a label that another row has"
        labels.add(row["label"])
        if not spec.get("gold_patch") and not spec.get("solution_cmd"):
            yield "have no gold_patch, so they can never be admitted"
        if row["grader"] == "eval_cmd":
            yield from _lint_command(spec)

    return _by_kind(rows, lint)


def describe_rows(rows: Iterable[TaskFields], path: str) -> list[str]:
    """Return what was understood of a dataset's rows: one sentence per kind, with their number and the first label, or
    the labels of all whose images have to be built."""

    def describe(row: TaskFields) -> Iterator[str]:
        spec = row["spec"]
        if is_built(row["image"]):
            command = f"ratchet tasks images build {shlex.quote(path)}"
            yield f"need an image that is built from environment/Dockerfile, when a box wants it or now by `{command}`:"
        yield f"run in {'an image of their own' if is_built(row['image']) else row['image']}, in {row['workdir']}"
        is_harbor = spec.get("verifier") == HARBOR
        verdict = "its reward file" if is_harbor else "its tests"
        needs = spec.get("needed_settings", {})
        default = "by default unprivileged" + (", whereas Harbor's default is root" if is_harbor else "")
        user = spec.get("tests_user") or needs.get("grading.user") or f"grading.user ({default})"
        yield f"are graded by {row['grader']} and {verdict}, as {user}"
        solution = spec.get("solution_cmd") or ("their gold_patch" if spec.get("gold_patch") else "nothing")
        yield f"are solved by {solution}"
        for name, value in needs.items():
            yield f"need {name} of {value}"
        if permitted := spec.get("permitted_network"):
            opened = "" if permitted == "no-network" else "; a run opens it by sandbox.network"
            yield f"permit this network: {permitted}{opened}"
        if spec.get("agent_user"):
            yield f"have the agent work as {spec['agent_user']}"

    return _by_kind(rows, describe)


def _by_kind(rows: Iterable[TaskFields], kinds: Callable[[TaskFields], Iterable[str]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        for kind in kinds(row):
            found.setdefault(kind, []).append(row["label"])
    return [
        f"{len(names)} rows {kind}" + (f" {', '.join(names)}" if kind[-1] == ":" else f"; first {names[0]}")
        for kind, names in found.items()
    ]


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
