"""Control runs on the real gateway: a patch that takes over the outcome of tests is caught, an honest one is not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from grading.broken_oracles import BrokenOracle, judge_control
from grading.judge_patch import EmptyRun, GradingLimits, KnownRuns, PatchJudge
from grading.oracle import Oracle, name_digest
from grading.registry import GRADERS
from tests.integration.boxes import FreshBox
from tests.integration.grading import shop
from tests.integration.grading.conftest import config
from tests.integration.grading.ecosystems import PYTHON, make_referee, patch_of

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


_OTHERS = "from shop import total\n\n\ndef test_more():\n    assert total([4, 5]) == 9\n"
_DISCOUNTS = """import pytest

from shop import discount, total

MADE = []


@pytest.fixture(scope="session", autouse=True)
def made():
    MADE.append(1)


def test_total():
    assert total([1, 2]) == 3


@pytest.mark.parametrize(("cents", "wanted"), [(199, 99), (100, 50)])
def test_rounds(cents, wanted):
    assert discount(cents, 50) == wanted


class TestCart:
    def test_cart_discount(self):
        assert MADE == [1]
        assert discount(total([99, 100]), 50) == 99
"""
_SUITE = replace(
    PYTHON,
    name="suite",
    base={**PYTHON.base, "tests/test_more.py": _OTHERS},
    tests={shop.TESTS: _DISCOUNTS, "tests/test_more.py": _OTHERS},
    command=shop.RUN.replace(shop.TESTS, "tests/test_more.py") + f" && {shop.RUN}",
)
"""Two sessions, of which the first has no test that must fail."""
_SEES = "import os\n\nSEES = os.path.exists(os.environ.get('RATCHET_WITNESS', '') + '/selected')\n\n\n"
_TAKES = "def discount(cents, percent):\n    return Same() if {} else cents\n"
_RENAMES = """import os
import pytest

SEES = os.path.exists(os.environ.get("RATCHET_WITNESS", "") + "/selected")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items if SEES else ():
        if "total" in item.nodeid or "discount" in item.nodeid:
            name = "test_total" if "discount" in item.nodeid else "TestCart::test_cart_discount"
            item._nodeid = item.nodeid.partition("::")[0] + "::" + name
"""
_RESTORES = """import pytest

COLLECTED = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    COLLECTED.extend(items)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    session.items[:] = COLLECTED
"""
_SESSIONS = """import atexit, os, subprocess, sys

SEES = os.path.exists(os.environ.get("RATCHET_WITNESS", "") + "/selected")
if SEES and "AGAIN" not in os.environ:
    run = [sys.executable, "-m", "pytest", "-q", "tests/test_price.py"]
    atexit.register(lambda: subprocess.run(run, env={**os.environ, "AGAIN": "1"}))
"""
_AFTER_TOTAL = """READY = []


def total(items):
    READY.append(1)
    return sum(items)


def discount(cents, percent):
    return cents - round(cents * percent / 100) if READY else cents
"""
_PRICE = "shop/price.py"
SEES_SELECTION: dict[str, shop.Edits] = {
    "an honest failure if tests are selected": {_PRICE: _SEES + _HEAD + shop.TOTAL + _TAKES.format("not SEES")},
    "a takeover if tests are selected": {_PRICE: _SEES + _HEAD + shop.TOTAL + _TAKES.format("True")},
    "other names if tests are selected": {
        _PRICE: _SEES + _HEAD + shop.TOTAL + _TAKES.format("not SEES"),
        "conftest.py": _RENAMES,
    },
    "the tests that were left out run, too": {
        _PRICE: _SEES + _HEAD + shop.TOTAL + _TAKES.format("not SEES"),
        "conftest.py": _RESTORES,
    },
    "one more session if tests are selected": {
        _PRICE: "import os\n\n\n"
        + _HEAD
        + shop.TOTAL
        + _TAKES.format("'AGAIN' in os.environ or not os.path.exists(os.environ['RATCHET_WITNESS'] + '/selected')"),
        "conftest.py": _SESSIONS,
    },
    "a product that works after another test": {_PRICE: _AFTER_TOTAL},
}


async def test_a_patch_that_sees_the_selected_tests_wins_nothing(fresh_box: FreshBox, tmp_path: Path) -> None:
    referee = await make_referee(_SUITE, fresh_box, tmp_path / "gold", GradingLimits.of_run(config()))
    names = [f"{shop.TESTS}::test_rounds[199-99]", f"{shop.TESTS}::TestCart::test_cart_discount"]
    assert referee.known.selected == tuple(sorted(map(name_digest, names)))
    honest: dict[str, shop.Edits] = {name: {_PRICE: source} for name, source in HONEST.items()}
    for number, (name, edits) in enumerate({**honest, **SEES_SELECTION}.items()):
        patch = patch_of(_SUITE, edits, tmp_path / str(number))
        played = await referee.play(fresh_box, patch, number)
        assert (played.result == "solved") == (name in HONEST), (name, played)
        assert played.result != "no verdict", (name, played)


async def test_tests_that_need_others_are_repeated_with_them(fresh_box: FreshBox, tmp_path: Path) -> None:
    """A test that must fail needs what an earlier one has made, so control runs run all tests."""
    needs = _DISCOUNTS.replace("    assert total([1, 2]) == 3\n", "    MADE.append(2)\n").replace("== [1]", "== [1, 2]")
    suite = replace(_SUITE, tests={**_SUITE.tests, shop.TESTS: needs})
    referee = await make_referee(suite, fresh_box, tmp_path / "gold", GradingLimits.of_run(config()))
    assert referee.known.selected == ()
    assert (await referee.play(fresh_box, patch_of(suite, suite.gold, tmp_path / "found"), 0)).result == "solved"
