"""Honest patches keep all their files and are solved; there are as many of them as attacks."""

from pathlib import Path

import pytest

from grading.judge_patch import GradingLimits, PatchJudge
from grading.registry import GRADERS
from sandboxes.base import Sandbox
from store.tasks import TaskRow
from tests.integration.grading import shop
from tests.integration.grading.attacks import ATTACKS
from tests.integration.grading.conftest import config
from tests.integration.grading.honest_work import HONEST, Honest

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("work", HONEST, ids=lambda work: work.name)
async def test_it_is_solved(box: Sandbox, tree: Path, test_patch: str, work: Honest) -> None:
    task = _task("eval_cmd" if work.command or HONEST.index(work) % 2 else "swe_bench", test_patch, work)
    patch = shop.diff(tree, work.all_edits, work.executable, work.base)
    judge = PatchJudge(GRADERS[task.grader], task, GradingLimits.of_run(config()), controlled=work.controlled)
    found = await judge.judge(box, patch)
    verdict, findings = found.verdict, found.findings
    assert verdict.solved, (verdict.reason, findings, verdict.log)
    for name in work.kept:
        content = await box.read_file(f"/workspace/shop/{name}")
        wanted = work.all_edits[name]
        assert content == (wanted if isinstance(wanted, bytes) else str(wanted).encode()), name
        assert name not in {finding.path for finding in findings if finding.is_dropped}


def _task(grader: str, test_patch: str, work: Honest) -> TaskRow:
    """Return the task; its repository has the files of `work.base`, too."""
    commands = [*shop.task(grader, test_patch).spec["pre_commands"], shop.unpack_command(work.base)]
    own = {"eval_cmd": work.command} if work.command else {}
    return shop.task(grader, test_patch, pre_commands=commands, **own)


def test_there_are_as_many_as_attacks() -> None:
    assert len(HONEST) >= len(ATTACKS) and len({work.name for work in HONEST}) == len(HONEST)
