"""Honest patches that are wrong are not solved, and no integrity rule rejects them."""

from pathlib import Path

import pytest

from grading.judge_patch import GradingLimits, PatchJudge
from grading.registry import GRADERS
from tests.integration.boxes import FreshBox
from tests.integration.grading import shop
from tests.integration.grading.conftest import judge_in_boxes

PRICE = "shop/price.py"

WRONG: dict[str, shop.Edits] = {
    "does not parse": {PRICE: shop.TOTAL + "def discount(cents, percent:\n    return 1\n"},
    "mixes tabs and spaces": {PRICE: shop.TOTAL + "def discount(cents, percent):\n\tif cents:\n        return 1\n"},
    "has a null byte": {PRICE: b"x = 1\0\n"},
    "is not UTF-8": {PRICE: b"x = '\xff'\n"},
    "uses an unknown name at import": {PRICE: shop.TOTAL + shop.FIX + "RATE = undefined\n"},
    "imports a module that is not installed": {PRICE: "import decimals_of_money\n" + shop.TOTAL + shop.FIX},
    "imports itself in a circle": {PRICE: "from shop import report_rate\n" + shop.TOTAL + shop.FIX},
    "has lost a function": {PRICE: shop.FIX},
    "has lost its module": {PRICE: None},
    "has lost its package": {"shop/__init__.py": None, PRICE: None, "shop/report.py": None},
    "ends the process at import": {PRICE: "import sys\nsys.exit(3)\n" + shop.TOTAL + shop.FIX},
    "ends the process in a function": {
        PRICE: "import sys\n" + shop.TOTAL + "def discount(cents, percent):\n    sys.exit(2)\n"
    },
    "is killed": {PRICE: "import os\n" + shop.TOTAL + "def discount(cents, percent):\n    os.kill(os.getpid(), 9)\n"},
    "recurses for ever": {PRICE: shop.TOTAL + "def discount(cents, percent):\n    return discount(cents, percent)\n"},
    "loops for ever": {
        PRICE: "import time\n"
        + shop.TOTAL
        + "def discount(cents, percent):\n    while True:\n        time.sleep(0.1)\n"
    },
    "raises": {PRICE: shop.TOTAL + "def discount(cents, percent):\n    raise KeyError(cents)\n"},
    "returns nothing": {PRICE: shop.TOTAL + "def discount(cents, percent):\n    pass\n"},
    "prints bytes that are no text": {PRICE: "import os\nos.write(1, bytes(range(256)))\n" + shop.TOTAL + shop.BUG},
    "closes the standard streams": {PRICE: "import os\nos.close(1)\nos.close(2)\n" + shop.TOTAL + shop.BUG},
    "changes the directory": {PRICE: "import os\nos.chdir('/')\n" + shop.TOTAL + shop.BUG},
    "breaks the project's conftest": {"conftest.py": "import nothing_of_that_name\n"},
    "breaks the project's settings": {"pyproject.toml": "[tool.pytest.ini_options\naddopts = 3\n"},
}

WITHOUT_NAMED_TESTS = (
    "does not parse",
    "ends the process at import",
    "is killed",
    "returns nothing",
    "closes the standard streams",
    "breaks the project's settings",
)
"""One for each way to fail that `eval_cmd` sees: it reads an exit code, and `swe_bench` the results of named tests."""
CASES = [*((name, "swe_bench") for name in WRONG), *((name, "eval_cmd") for name in WITHOUT_NAMED_TESTS)]


@pytest.mark.parametrize(("name", "grader"), CASES)
async def test_it_is_not_solved_and_not_rejected(
    fresh_box: FreshBox, tree: Path, test_patch: str, name: str, grader: str
) -> None:
    limits = GradingLimits(15 if name == "loops for ever" else 60, 60)
    judge = PatchJudge(GRADERS[grader], shop.task(grader, test_patch), limits)
    found = await judge_in_boxes(judge, fresh_box, shop.diff(tree, WRONG[name], (), {}))
    verdict = found.verdict
    assert not verdict.solved and not verdict.rejected, (verdict.rule, verdict.reason, verdict.log)
