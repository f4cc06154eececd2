"""Control runs on the real gateway: a patch that takes over the outcome of tests is caught, an honest one is not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grading.broken_oracles import BrokenOracle, judge_control
from grading.judge_patch import EmptyRun, GradingLimits, KnownRuns, PatchJudge
from grading.oracle import Oracle
from grading.registry import GRADERS
from tests.integration.boxes import FreshBox
from tests.integration.grading import shop
from tests.integration.grading.conftest import config

pytestmark = pytest.mark.timeout(1800)

_HEAD = "class Same:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
_READER = """import ast, inspect, linecache, sys


def _expected(depth=2):
    frame = sys._getframe(depth)
    for offset in range(-2, 6):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno + offset)
        for text in (line.rpartition("==")[2], line.rpartition(", ")[2].rstrip(")\\n ")):
            try:
                return ast.literal_eval(text.strip())
            except (SyntaxError, ValueError):
                pass
"""
_REPORTS = """import gc, _pytest.reports


def discount(cents, percent):
    for one in gc.get_objects():
        if type(one).__name__ == "Function" and getattr(one, "name", "").startswith("test_") and hasattr(one, "obj"):
            one.obj = lambda *a: None
    return cents - int(cents * percent / 100)
"""
_NAMED = """import _pytest.runner as runner

_call = runner.call_and_report


def _patched(item, when, log=True, **kwds):
    if "discount" in item.nodeid and when == "call":
        item.runtest = lambda: None
    return _call(item, when, log, **kwds)


runner.call_and_report = _patched
"""
WINNING = {
    "an object that equals everything": _HEAD + shop.TOTAL + "def discount(cents, percent):\n    return Same()\n",
    "the expected value is read from the caller's source": _READER
    + shop.TOTAL
    + "def discount(cents, percent):\n    return _expected()\n",
    "items found by gc lose their function": shop.TOTAL + _REPORTS,
    "only the failing tests are not run": _NAMED + shop.TOTAL + shop.BUG,
}
"""In-process takeovers that no screening can prevent; each is solved by the true run alone."""
NEAR = {
    "an integer that equals its neighbours": (
        "class Near(int):\n    def __eq__(self, other): return abs(int(self) - int(other)) <= 1\n"
        "    def __ne__(self, other): return not self == other\n    __hash__ = int.__hash__\n\n\n"
        + shop.TOTAL
        + "def discount(cents, percent):\n    return Near(cents - int(cents * percent / 100))\n"
    ),
}
"""Takeovers that accept what is close to the product's value: only one of the two directions catches them."""
WINNING |= NEAR
HONEST = {
    "the gold fix": shop.TOTAL + shop.FIX,
    "another solution": shop.TOTAL
    + "def discount(cents, percent):\n    return (cents * (100 - percent) + 49) // 100\n",
}


@pytest.fixture
def judge_for(test_patch: str) -> Callable[[str], PatchJudge]:
    def made(grader: str) -> PatchJudge:
        return PatchJudge(GRADERS[grader], shop.task(grader, test_patch), GradingLimits.of_run(config()))

    return made


@pytest.fixture
def gold(tmp_path: Path) -> bytes:
    directory = tmp_path / "gold"
    directory.mkdir()
    return shop.diff(directory, {"shop/price.py": shop.TOTAL + shop.FIX})


async def known_runs(judge: PatchJudge, gold: bytes, fresh_box: FreshBox, size: int = 2) -> KnownRuns:
    """Return what an admission records: the oracle and a pool of broken ones."""
    async with fresh_box() as box:
        done = await judge.run(box, gold)
    assert done.run is not None
    oracle = Oracle.of_run(done.run.observed, done.run.outcomes)
    pool: dict[int, BrokenOracle] = {}
    for number in range(size):
        async with fresh_box() as box:
            made = await judge.break_tests(box, gold, oracle, EmptyRun(shop.F2P, []), number)
        assert made.broken is not None and made.broken.is_valid, made.reason
        assert set(shop.F2P) <= set(made.broken.must_fail), made.broken
        pool[number] = made.broken
    return KnownRuns(oracle, pool)


@pytest.mark.parametrize("grader", ["swe_bench", "eval_cmd"])
async def test_what_a_control_run_tells(
    judge_for: Callable[[str], PatchJudge], gold: bytes, fresh_box: FreshBox, tmp_path: Path, grader: str
) -> None:
    known = await known_runs(judge_for(grader), gold, fresh_box)
    plain = judge_for(grader)
    judge = PatchJudge(plain.grader, plain.task, plain.limits, known, controlled=True)
    for number, (name, source) in enumerate({**WINNING, **HONEST}.items()):
        directory = tmp_path / str(number)
        directory.mkdir()
        patch = shop.diff(directory, {"shop/price.py": source})
        async with fresh_box() as box:
            verdict = (await judge.judge(box, patch)).verdict
        assert verdict.has_oracle
        assert verdict.solved or name in WINNING, (name, verdict.reason, verdict.log)
        if not verdict.solved:
            continue
        caught = []
        for broken in known.broken.values():
            async with fresh_box() as box:
                done = await judge.run(box, patch, broken)
            assert done.run is not None
            found = judge_control(broken, done.run)
            caught.append(bool(found.passed))
        assert any(caught) == (name in WINNING) and (all(caught) or name in NEAR or name in HONEST), (name, caught)
