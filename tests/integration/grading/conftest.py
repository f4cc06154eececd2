"""A fixture that judges a patch in a fresh box by the same code as the stage `grade`."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from grading.judge_patch import GradingLimits, JudgedPatch, PatchJudge
from grading.registry import GRADERS
from grading.run_hidden_tests import UnusableBoxError
from ratchet.config import RunConfig
from store.tasks import TaskRow
from tests.integration.boxes import FreshBox
from tests.integration.grading import shop

EVAL_SECONDS = 60.0


def config(eval_seconds: float = EVAL_SECONDS, **grading: Any) -> RunConfig:
    limits = {"eval_seconds": eval_seconds, "workspace_seconds": 300}
    return RunConfig.model_validate({"datasets": [{"path": "unused"}], "grading": grading, "limits": limits})


async def judge_in_boxes(judge: PatchJudge, fresh_box: FreshBox, patch: bytes) -> JudgedPatch:
    """Judge a patch as a rollout does: in another box if the machine starved the tests of CPU, three times at most."""
    for left in (2, 1, 0):
        async with fresh_box() as box:
            try:
                return await judge.judge(box, patch)
            except UnusableBoxError:
                if not left:
                    raise
    raise AssertionError


Judge = Callable[..., Awaitable[JudgedPatch]]


@pytest.fixture
def judged(fresh_box: FreshBox) -> Judge:
    """Judge a patch on a task in a fresh box."""

    async def run(task: TaskRow, patch: bytes, **options: Any) -> JudgedPatch:
        limits = GradingLimits.of_run(config(**options))
        return await judge_in_boxes(PatchJudge(GRADERS[task.grader], task, limits), fresh_box, patch)

    return run


@pytest.fixture(scope="session")
def test_patch(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shop.hidden_patch(tmp_path_factory.mktemp("hidden"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return an empty directory for the patch's repository."""
    directory = tmp_path / "tree"
    directory.mkdir()
    return directory
