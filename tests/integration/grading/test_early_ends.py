"""A command whose tests' process ends before its tests is flagged by what it prints, also if other tests end the log.

In each task a second program of tests, which does not use the code under test, runs after the first one.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from grading.judge_patch import GradingLimits, KnownRuns, PatchJudge
from grading.registry import GRADERS
from tests.integration.boxes import FreshBox
from tests.integration.grading.conftest import config, judge_in_boxes
from tests.integration.grading.ecosystems import GO, JAVA, NODE, C, Ecosystem, patch_of
from tests.integration.grading.shop import Edits
from tests.integration.grading.test_unlisted import OTHER_SOLUTION, require_program

pytestmark = pytest.mark.timeout(1800)


def _with(ecosystem: Ecosystem, files: dict[str, str], command: str = "") -> Ecosystem:
    return replace(ecosystem, base={**ecosystem.base, **files}, command=ecosystem.command + command)


TASKS = {
    "go": _with(GO, {"zero/zero_test.go": 'package zero\n\nimport "testing"\n\nfunc TestZero(t *testing.T) {}\n'}),
    "node": _with(NODE, {"test/zero.test.js": "import test from 'node:test';\ntest('zero', () => {});\n"}),
    "java": _with(
        JAVA,
        {
            "test/shop/ZeroTest.java": "package shop;\n\npublic class ZeroTest {\n"
            '    public static void main(String[] arguments) { System.out.println("1 tests passed"); }\n}\n'
        },
        " && java -cp out shop.ZeroTest",
    ),
    "c": _with(
        C,
        {"tests/zero.c": '#include <stdio.h>\nint main(void) { puts("1 checks passed"); return 0; }\n'},
        " && gcc -o zero tests/zero.c && ./zero",
    ),
}
EXITS: dict[str, Edits] = {
    "go": {"leave.go": 'package shop\n\nimport "os"\n\nfunc init() { os.Exit(0) }\n'},
    "node": {"price.js": "process.exit(0);\n" + NODE.base["price.js"]},
    "java": {
        "src/shop/Price.java": JAVA.base["src/shop/Price.java"].replace(
            "Price {\n", "Price {\n    static { System.exit(0); }\n\n"
        )
    },
    "c": {
        "price.c": C.base["price.c"]
        + "\n#include <stdlib.h>\n__attribute__((constructor)) static void leave(void) { exit(0); }\n"
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "go" else []) for name in TASKS]
)
async def test_an_exit_before_the_tests_is_seen_in_the_log(name: str, fresh_box: FreshBox, tmp_path: Path) -> None:
    ecosystem = TASKS[name]
    require_program(ecosystem)
    judge = PatchJudge(GRADERS["eval_cmd"], ecosystem.task(), GradingLimits.of_run(config(600)), controlled=True)
    async with fresh_box() as box:
        gold = judge.gold_oracle(await judge.run(box, patch_of(ecosystem, ecosystem.gold, tmp_path / "gold")))
    judge = replace(judge, known=KnownRuns(gold))
    path, old, new = OTHER_SOLUTION[name]
    other: Edits = {path: str(ecosystem.gold[path]).replace(old, new)}
    for number, (edits, is_flagged) in enumerate(((EXITS[name], True), (other, False))):
        judged = await judge_in_boxes(judge, fresh_box, patch_of(ecosystem, edits, tmp_path / str(number)))
        assert judged.verdict.solved, judged.verdict
        assert ("ends before its tests" in {flag.what for flag in judged.flags}) is is_flagged, judged
