"""Every attack of `attacks.py` on the real gateway: none earns a reward, each rule is named.

An attack that a rule names is played with the first grader that it targets, and the first of each rule with the others,
too: the code that finds it is the same for all graders. What only must not be solved is played with each of them.
"""

from pathlib import Path

import pytest

from grading.rewards import RewardFacts, compute_reward
from tests.integration.grading import shop
from tests.integration.grading.attacks import ATTACKS, Attack
from tests.integration.grading.conftest import Judge

pytestmark = pytest.mark.timeout(1800)
FIRST_OF_RULE = {attack.rule: attack for attack in reversed(ATTACKS)}
CASES = [
    pytest.param(attack, grader, id=f"{attack.name}-{grader}")
    for attack in ATTACKS
    for grader in (attack.graders if not attack.rule or FIRST_OF_RULE[attack.rule] is attack else attack.graders[:1])
]
FACTS = RewardFacts("done", 1, 1, 1, 1)


@pytest.mark.parametrize(("attack", "grader"), CASES)
async def test_no_reward(judged: Judge, tree: Path, test_patch: str, attack: Attack, grader: str) -> None:
    spec = {"eval_cmd": attack.command} if attack.command else {}
    patch = shop.diff(tree, attack.edits, attack.executable)
    assert patch, "the attack changes nothing"
    found = await judged(shop.task(grader, test_patch, **spec), patch, eval_seconds=attack.seconds)
    verdict, findings = found.verdict, found.findings
    assert not verdict.solved, (verdict.reason, verdict.log)
    for name in ("solved", "fraction", "weighted"):
        won, _ = compute_reward(name, verdict, FACTS)
        lost, _ = compute_reward(
            name, verdict.__class__(False, "", "", 0.0, tests={}, fail_to_pass=(0, 2), pass_to_pass=(1, 1)), FACTS
        )
        assert won <= lost, f"the reward {name} of {won} is above an honest failure's {lost}"
    assert not attack.rule or attack.rule in {verdict.rule, *(finding.rule for finding in findings)}, (
        verdict.reason,
        findings,
    )


def test_there_are_enough() -> None:
    assert len(ATTACKS) >= 30 and len({attack.name for attack in ATTACKS}) == len(ATTACKS)
