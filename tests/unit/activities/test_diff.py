"""A patch counts only if all of it has arrived."""

import base64
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from activities.diff import DiffActivities, parse_diff
from ratchet.errors import SandboxBusyError

PATCH = b"diff --git a/x.py b/x.py\n" + b"+line\n" * 50


def printed(body: bytes = PATCH, num_files: int = 1, of: bytes = PATCH) -> str:
    """Return the script's output for the diff `of`, if `body` arrives."""
    return f"{num_files} {len(of)} {hashlib.sha256(of).hexdigest()}\n{base64.b64encode(body).decode()}\n"


def test_a_whole_diff() -> None:
    captured = parse_diff(printed(), 1000)
    assert (captured.diff, captured.num_files, captured.reason) == (PATCH, 1, "")
    assert parse_diff(printed(b"", 0, b""), 1000).diff == b""


def test_a_diff_that_is_cut_anywhere_is_no_diff() -> None:
    """A cut after the first line was an empty patch, and a cut within the second a shorter patch."""
    whole = printed()
    for length in range(len(whole)):
        with pytest.raises(SandboxBusyError, match="not arrived whole"):
            parse_diff(whole[:length], 1000)


@pytest.mark.parametrize(
    "wrong", [printed(PATCH[:-1]), printed(PATCH[:-1] + b"x"), printed(b"", 1, b""), printed().replace("=\n", "\n")]
)
def test_a_diff_that_is_not_what_the_box_has_measured_is_no_diff(wrong: str) -> None:
    with pytest.raises(SandboxBusyError, match="not arrived whole"):
        parse_diff(wrong, 1000)


def test_a_diff_above_the_limit_says_its_size() -> None:
    captured = parse_diff(f"3 5000 {hashlib.sha256(PATCH).hexdigest()}\ntoo_large\n", 1000)
    assert captured.diff == b"" and captured.reason.startswith("the diff of 5000 bytes is above")


@pytest.mark.parametrize("verifier", ["harbor", None])
@pytest.mark.parametrize("row_says", [True, False])
@pytest.mark.parametrize("admitted", [True, False])
@pytest.mark.parametrize("reason", ["", "the diff is above the limit"])
async def test_only_a_patch_that_is_empty_by_itself_is_graded(
    monkeypatch: pytest.MonkeyPatch, verifier: str | None, row_says: bool, admitted: bool, reason: str
) -> None:
    """A left-out patch is never graded as unchanged code, which may earn a fraction."""

    async def is_admitted(*_: Any) -> bool:
        return admitted

    async def store_grade(_: Any, verdict: Any) -> int:
        stored.append(verdict)
        return 7

    stored: list[Any] = []
    monkeypatch.setattr("activities.diff.admissions.is_admitted", is_admitted)
    monkeypatch.setattr("activities.diff.grades.store_grade", store_grade)
    monkeypatch.setattr("activities.diff.grade_row", lambda _rollout, _patch, _grader, judged: judged.verdict)
    monkeypatch.setattr("activities.diff.find_grader", lambda *_: SimpleNamespace(name="eval_cmd", version=1))
    task: Any = SimpleNamespace(id=1, grader="eval_cmd", spec={"verifier": verifier, "empty_patch_fails": row_says})
    unused: Any = None
    stage_input: Any = SimpleNamespace(rollout_id=1)
    activities = DiffActivities(unused, unused, unused, unused, {})
    grade_id = await activities._empty_verdict(unused, stage_input, 2, task, reason)
    known = bool(reason) or row_says or (admitted and verifier is None)
    assert grade_id == (7 if known else None)
    assert [verdict.solved for verdict in stored] == [False] * known
    assert all((reason or "the patch is empty") in verdict.reason for verdict in stored)
