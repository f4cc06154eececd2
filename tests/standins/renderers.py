"""Renderers of a user, named in a config by their import paths."""

from typing import Any

from viewer.renderers.registry import OwnPart, ShownRollout


def facts(rollout: ShownRollout) -> list[OwnPart]:
    """Show what a renderer gets, with markup in each place that a page has for its texts."""
    markup = "<script>alert(1)</script>"
    calls = [use.title for turn in rollout.turns if turn.answer for use in turn.answer.tool_uses]
    rows: list[list[Any]] = [[f"call {markup}", "reward"], *([call, rollout.head.reward] for call in calls)]
    return [
        OwnPart(f"asked: {rollout.task['problem_statement']} {markup}", rows=rows),
        OwnPart("changed", rollout.patch, "change.diff"),
        OwnPart("code", f"print({markup!r})", "code.py"),
    ]


def breaks(rollout: ShownRollout) -> list[OwnPart]:
    raise KeyError("no such metadata")


def returns_texts(rollout: ShownRollout) -> list[str]:
    return ["a text is no part"]


def has_many_rows(rollout: ShownRollout) -> list[OwnPart]:
    return [OwnPart("many", rows=[["number"], *([str(number)] for number in range(100_000))])]
