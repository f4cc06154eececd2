"""Honest patches keep all their files and are solved; there are as many of them as attacks."""

from pathlib import Path

import pytest

from activities.sandboxes.base import Sandbox
from tests.integration.activities import shop
from tests.integration.activities.attacks import ATTACKS
from tests.integration.activities.conftest import Judge
from tests.integration.activities.honest_work import HONEST, Honest

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("work", HONEST, ids=lambda work: work.name)
async def test_it_is_solved(judged: Judge, box: Sandbox, tree: Path, test_patch: str, work: Honest) -> None:
    grader = "swe_bench" if HONEST.index(work) % 2 == 0 else "eval_cmd"
    patch = shop.diff(tree, work.all_edits, work.executable)
    verdict, findings = await judged(shop.task(grader, test_patch), patch)
    assert verdict.solved, (verdict.reason, findings, verdict.log)
    for name in work.kept:
        content = await box.read_file(f"/workspace/shop/{name}")
        wanted = work.all_edits[name]
        assert content == (wanted if isinstance(wanted, bytes) else str(wanted).encode()), name
        assert name not in {finding.path for finding in findings}


def test_there_are_as_many_as_attacks() -> None:
    assert len(HONEST) >= len(ATTACKS) and len({work.name for work in HONEST}) == len(HONEST)
