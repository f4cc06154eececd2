"""Harbor's directories get Harbor's rewards: for its solution, for nothing and for a wrong solution."""

from dataclasses import replace
from pathlib import Path

import pytest

from activities.admission import solve
from activities.datasets.archives import File, pack_archive
from activities.datasets.formats import read_rows
from grading.base import Verdict
from grading.judge_patch import GradingLimits, PatchJudge
from grading.registry import GRADERS
from grading.rewards import RewardFacts, compute_reward
from ratchet.config import DatasetConfig
from ratchet.errors import GraderFailedError, SuspectPatchError
from ratchet.grading_payloads import TrialInput
from store.tasks import TaskRow
from tests.integration.boxes import FreshBox
from tests.integration.grading.conftest import config, judge_in_boxes
from tests.integration.grading.harbor_tasks import EMPTY, NO_FILE, NOTHING_RAN, TASKS, UNREADABLE, HarborTask

pytestmark = pytest.mark.timeout(1200)
_REASONS = {
    NO_FILE: "wrote neither",
    EMPTY: "is empty",
    UNREADABLE: "expected a finite number",
    NOTHING_RAN: "did not find",
}
_TRIAL = TrialInput(task_id=0, patch="gold", repeat=0, eval_seconds=60, workspace_seconds=60)


def _row(task: HarborTask, directory: Path) -> TaskRow:
    (row,) = read_rows(DatasetConfig(path=str(task.write(directory))), "")
    spec = {**row["spec"], "empty_patch_fails": True}
    return TaskRow(0, row["label"], row["image"], row["workdir"], row["grader"], spec)


async def _judged(row: TaskRow, patch: bytes, fresh_box: FreshBox) -> Verdict | str:
    user = row.spec["needed_settings"].get("grading.user", "agent")
    judge = PatchJudge(GRADERS[row.grader], row, GradingLimits.of_run(config(user=user)), suspected=frozenset())
    for _ in range(3):  # as the workflow does: a busy machine may end a run in another way each time
        try:
            return (await judge_in_boxes(judge, fresh_box, patch)).verdict
        except SuspectPatchError as error:
            judge = replace(judge, suspected=frozenset({*judge.suspected, error.suspicion}))
        except GraderFailedError as error:
            return str(error)
    raise AssertionError(f"no box decides: {judge.suspected}")


@pytest.mark.parametrize("name", TASKS)
async def test_a_task_gets_harbors_rewards(fresh_box: FreshBox, tmp_path: Path, name: str) -> None:
    task = TASKS[name]
    row = _row(task, tmp_path / "task")
    wrong = pack_archive({"solution/solve.sh": File(task.wrong.encode())})
    solutions = [row, None, replace(row, spec={**row.spec, "solution_archive": wrong})]
    for solution, expected in zip(solutions, task.rewards, strict=True):
        patch = b""
        if solution is not None:
            async with fresh_box() as box:
                patch = (await solve(box, solution, _TRIAL)).encode()
        found = await _judged(row, patch, fresh_box)
        if isinstance(expected, str):
            assert isinstance(found, str) and _REASONS[expected] in found and "/logs/verifier/" in found
            continue
        assert isinstance(found, Verdict), found
        assert found.rewards == expected, (found.reason, found.log)
        number = expected.get("reward", min(expected.values()))
        assert found.solved == (number >= 1)
        assert compute_reward("solved", found, RewardFacts(None, 1, 1, 1, 1)).value == number


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        ("%%%%", "is not base64"),
        ("YWJj\nZGVm", "is not base64"),
        ("YWJjZA", "is not base64"),
        ("é", "is not base64"),
        ("YWJj", "cannot be unpacked"),
        (pack_archive({"solution/solve.sh": File(b"touch x\n")})[:80], "cannot be unpacked"),
    ],
)
async def test_a_damaged_archive_of_the_solution_is_named(
    fresh_box: FreshBox, tmp_path: Path, archive: str, message: str
) -> None:
    row = _row(TASKS["hello"], tmp_path / "task")
    with pytest.raises(GraderFailedError, match=rf"metadata\.solution_archive {message}.*pack it again"):
        async with fresh_box() as box:
            await solve(box, replace(row, spec={**row.spec, "solution_archive": archive}), _TRIAL)


async def test_a_solution_that_changes_nothing_is_named(fresh_box: FreshBox, tmp_path: Path) -> None:
    row = _row(replace(TASKS["hello"], solution="no-such-program\n"), tmp_path / "task")
    with pytest.raises(GraderFailedError, match=r"no file below /app.*exit code 127: .*no-such-program"):
        async with fresh_box() as box:
            await solve(box, row, _TRIAL)
