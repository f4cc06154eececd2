"""The tests that a task lists: each has its outcome, and one that a log does not name is not taken for a passed one."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from reads.rollouts import GradeView
from viewer.renderers.listed_tests import render
from viewer.renderers.registry import OwnPart, ShownRollout

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def shown(tests: dict[str, str] | None, **listed: Any) -> list[OwnPart]:
    columns = (1, "swe_bench", "1", False, False, "", "", tests or {}, None, None, None, [], 0, False, [], 1.0)
    grade = None if tests is None else GradeView(*columns, 1, None, NOW)
    head: Any = SimpleNamespace()
    return render(ShownRollout(head, listed, [], "", grade))


def test_what_must_newly_pass_comes_first_and_what_still_passes_is_only_counted() -> None:
    tests = {"test_old": "passed", "test_other": "FAILED", "test_new[1]": "passed", "test_new[2]": "failed"}
    listed = {"fail_to_pass": ["test_new", "test_gone"], "pass_to_pass": ["test_old", "test_other"]}
    for family in ("swe_bench", "swepro"):
        (part,) = shown(tests, **{family: listed})
        assert part.title == "0 of 2 tests that must newly pass did, 1 of 2 that must still pass"
        assert [tuple(row) for row in part.rows[1:]] == [
            ("test_new", "newly pass", "failed"),
            ("test_gone", "newly pass", "not seen"),
            ("test_other", "still pass", "failed"),
        ]


def test_a_name_is_not_the_beginning_of_another() -> None:
    (part,) = shown({"test_new_too": "passed"}, swe_bench={"fail_to_pass": ["test_new"], "pass_to_pass": []})
    assert [row[2] for row in part.rows[1:]] == ["not seen"]


def test_without_a_verdict_there_is_nothing_to_show() -> None:
    assert shown(None, swe_bench={"fail_to_pass": ["test_new"]}) == []
