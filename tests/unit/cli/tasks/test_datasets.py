"""A task's line in the list of a dataset has the trials of its newest admission by patch."""

from typing import Any

from cli.tasks.datasets import _evidence


def trial(patch: str, solved: bool, error: str = "", reason: str = "") -> dict[str, Any]:
    return {"patch": patch, "solved": solved, "error": error, "reason": reason}


def test_trials_are_counted_by_patch_and_one_without_a_verdict_counts_for_neither() -> None:
    trials = [trial("gold", True), trial("gold", True), trial("gold", False)]
    trials += [trial("empty", False), trial("empty", True), trial("empty", False, error="the box died")]
    trials += [trial("broken", True, reason="failed"), trial("broken", False, reason="it passes")]
    row = {"evidence": trials, "gold_seconds": 1.26}
    assert _evidence(row) == ["2/3", "1/3", "1.3", "1/2: it passes"]
    assert _evidence({"evidence": trials[:3], "gold_seconds": None}) == ["2/3", "0/0", "", ""]


def test_a_task_that_was_not_examined_has_none() -> None:
    assert _evidence({"evidence": None, "gold_seconds": None}) == [""] * 4
