"""Attacks of `unlisted_attacks.py` are not solved or rejected, with the oracle and the control runs of an admission.

The solutions of each ecosystem, the gold one and another, are solved, and so is the honest work of `unusual_work.py`.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grading.judge_patch import GradingLimits, PatchJudge
from grading.registry import GRADERS
from ratchet.temporal_settings import load_temporal_settings
from tests.integration.boxes import FreshBox
from tests.integration.grading.conftest import config, judge_in_boxes
from tests.integration.grading.ecosystems import ECOSYSTEMS, Ecosystem, Referee, make_referee, patch_of
from tests.integration.grading.unlisted_attacks import UNLISTED, UnlistedAttack
from tests.integration.grading.unusual_work import FLAGGED, HONEST_CODE, UNUSUAL_WORK, UnusualWork

pytestmark = pytest.mark.timeout(1800)
_REFEREES: dict[str, Referee] = {}
OTHER_SOLUTION = {
    "python": ("shop/price.py", "cents - round(cents * percent / 100)", "(cents * (100 - percent) + 49) // 100"),
    "several": ("shop/price.py", "cents - round(cents * percent / 100)", "(cents * (100 - percent) + 49) // 100"),
    "catalogue": (
        "shop/price.py",
        '    """\n    >>> discount(199, 50)\n    99\n    """\n    return cents - round(cents * percent / 100)',
        "    return (cents * (100 - percent) + 49) // 100",
    ),
    "node": ("price.js", "cents - Math.round(cents * percent / 100)", "Math.ceil(cents * (100 - percent) / 100 - 0.5)"),
    "go": ("price.go", "cents - (cents*percent+50)/100", "(cents*(100-percent) + 49) / 100"),
    "java": ("src/shop/Price.java", "cents - (cents * percent + 50) / 100", "(cents * (100 - percent) + 49) / 100"),
    "c": ("price.c", "cents - (cents * percent + 50) / 100", "(cents * (100 - percent) + 49) / 100"),
}


def require_program(ecosystem: Ecosystem) -> None:
    if shutil.which(ecosystem.program) is None and not Path(f"/usr/local/go/bin/{ecosystem.program}").exists():
        pytest.skip(f"{ecosystem.program} is not installed")


async def referee_of(name: str, fresh_box: FreshBox, directory: Path) -> Referee:
    """Return what plays attacks on an ecosystem's task; admission runs once per session."""
    ecosystem = ECOSYSTEMS[name]
    require_program(ecosystem)
    if name not in _REFEREES:
        limits = GradingLimits.of_run(config(eval_seconds=30))
        _REFEREES[name] = await make_referee(ecosystem, fresh_box, directory / "gold", limits)
    return _REFEREES[name]


def _case(attack: UnlistedAttack) -> Any:
    """Return a parameter of the test. A Go test costs 20 s of compilation; the attacks of others are played by hand."""
    is_slow = attack.ecosystem == "go" or (attack.author != "known" and attack.ecosystem != "several")
    return pytest.param(attack, id=f"{attack.ecosystem}-{attack.name}", marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("attack", [_case(attack) for attack in UNLISTED])
async def test_it_wins_nothing(attack: UnlistedAttack, fresh_box: FreshBox, tmp_path: Path) -> None:
    limits = GradingLimits.of_run(config(eval_seconds=attack.seconds))
    referee = replace(await referee_of(attack.ecosystem, fresh_box, tmp_path), limits=limits)
    patch = patch_of(referee.ecosystem, attack.edits, tmp_path / "tree", attack.executable)
    assert patch, "the attack changes nothing"
    for _ in range(load_temporal_settings().rollout.grade_tries):  # as often as the workflow takes another box
        played = await referee.play(fresh_box, patch, UNLISTED.index(attack))
        if played.result != "no verdict":
            break
    assert played.result in ("not solved", "rejected"), played


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "go" else []) for name in ECOSYSTEMS]
)
async def test_a_solution_is_solved(name: str, fresh_box: FreshBox, tmp_path: Path) -> None:
    referee = await referee_of(name, fresh_box, tmp_path)
    path, old, new = OTHER_SOLUTION[name]
    gold = str(referee.ecosystem.gold[path])
    assert old in gold
    for number, text in enumerate((gold, gold.replace(old, new))):
        patch = patch_of(referee.ecosystem, {**referee.ecosystem.gold, path: text}, tmp_path / str(number))
        played = await referee.play(fresh_box, patch, number)
        assert played.result == "solved" and not played.flags, (number, played)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(work, id=work.name, marks=[pytest.mark.slow] if work.ecosystem == "go" else [])
        for work in UNUSUAL_WORK
    ],
)
async def test_unusual_work_is_solved_without_a_flag(work: UnusualWork, fresh_box: FreshBox, tmp_path: Path) -> None:
    referee = replace(await referee_of(work.ecosystem, fresh_box, tmp_path), ecosystem=work.task_of())
    patch = patch_of(referee.ecosystem, work.edits, tmp_path / "tree", work.executable)
    played = await referee.play(fresh_box, patch, UNUSUAL_WORK.index(work))
    assert played.result == "solved", played
    assert not played.flags or work.name in FLAGGED, played.flags


@pytest.mark.slow
@pytest.mark.parametrize("work", [pytest.param(work, id=work.name) for work in HONEST_CODE])
async def test_honest_code_is_solved_without_a_flag(work: UnusualWork, fresh_box: FreshBox, tmp_path: Path) -> None:
    ecosystem = work.task_of()
    require_program(ecosystem)
    judge = PatchJudge(GRADERS["eval_cmd"], ecosystem.task(), GradingLimits.of_run(config()), controlled=True)
    judged = await judge_in_boxes(judge, fresh_box, patch_of(ecosystem, work.edits, tmp_path / "tree", work.executable))
    assert judged.verdict.solved, judged.verdict
    assert not judged.flags or work.name in FLAGGED, judged.flags


def test_few_honest_patches_are_flagged() -> None:
    assert len(FLAGGED) <= 0.05 * len(UNUSUAL_WORK + HONEST_CODE)
