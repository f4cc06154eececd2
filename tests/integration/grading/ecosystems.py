"""The same small task in five ecosystems: a function that must round, its hidden tests, and a correct solution.

Attacks and honest work of each ecosystem are judged as a rollout's patches are: by the oracle that admission records,
and by a control run if the verdict is solved.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from grading.base import Verdict
from grading.broken_oracles import BrokenOracle, confirmed_pool, judge_control, selectable_tests
from grading.flags import Flag
from grading.judge_patch import EmptyRun, GradingLimits, KnownRuns, PatchJudge
from grading.registry import GRADERS
from ratchet.errors import GraderFailedError
from store.tasks import TaskRow
from tests.integration.boxes import FreshBox
from tests.integration.grading import shop
from tests.integration.grading.conftest import judge_in_boxes
from tests.integration.grading.shop import Edits

WORKDIR = "/workspace/shop"


@dataclass(frozen=True)
class Ecosystem:
    """A task. `program`: what must be installed. `tests`: path → text of the hidden test files."""

    name: str
    program: str
    base: dict[str, str]
    gold: Edits
    tests: dict[str, str]
    command: str

    def task(self) -> TaskRow:
        spec = {
            "pre_commands": [shop.commit_command(self.base)],
            "problem_statement": "discount must round",
            "eval_cmd": self.command,
            "empty_patch_fails": True,
            "test_files": sorted(self.tests),
            "tests_archive": shop.archive(self.tests),
        }
        return TaskRow(id=1, label=self.name, image="host", workdir=WORKDIR, grader="eval_cmd", spec=spec)


PYTHON = Ecosystem(
    "python",
    "python3",
    {**shop.BASE, "tests/__init__.py": ""},
    {"shop/price.py": shop.TOTAL + shop.FIX},
    {shop.TESTS: shop.HIDDEN_TESTS},
    shop.RUN,
)
SEVERAL = replace(
    PYTHON,
    name="several",
    tests={
        shop.TESTS: (
            "from shop import discount, total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n\n\n"
            "def test_discount():\n    assert total([]) == 0\n    assert discount(100, 10) == 90\n"
            "    assert discount(200, 50) == 100\n    assert discount(199, 50) == 99\n"
            "    assert discount(1000, 5) == 950\n    assert discount(0, 50) == 0\n"
        )
    },
)
"""A test with many assertions, of which only one fails without a solution."""
CATALOGUE = Ecosystem(
    "catalogue",
    "python3",
    {
        **shop.BASE,
        "tests/__init__.py": "",
        "tests/test_report.py": (
            "from shop.report import line\n\n\ndef test_line():\n    assert line('tea', 3) == 'tea: 3'\n"
        ),
        "shop/rates.py": "RATES = {'third': 33}\n",
        "Makefile": f"test:\n\t{shop.PYTHON} -B -m pytest -q -p no:cacheprovider --doctest-modules shop tests\n",
    },
    {
        "shop/price.py": shop.TOTAL
        + shop.FIX.replace(":\n", ':\n    """\n    >>> discount(199, 50)\n    99\n    """\n'),
        "shop/rates.py": "RATES = {'third': 33, 'half': 50}\n",
    },
    {
        shop.TESTS: (
            "import pytest\n\nfrom shop import discount, total\nfrom shop.rates import RATES\n\n\n"
            "def test_total():\n    assert total([1, 2]) == 3\n\n\n"
            "def test_half_price():\n    assert discount(199, 50) == 99\n    assert 50 in RATES.values()\n\n\n"
            "@pytest.mark.parametrize('name', sorted(RATES))\n"
            "def test_rate(name):\n    assert discount(1990, RATES[name]) == {33: 1333, 50: 995}[RATES[name]]\n"
        )
    },
    "make -s test",
)
"""Tests of the product's own table, a doctest that only the gold patch has, and tests of the base."""
NODE = Ecosystem(
    "node",
    "node",
    {
        "package.json": '{"name": "shop", "type": "module", "scripts": {"test": "node --test test/"}}\n',
        "price.js": (
            "export function total(items) { return items.reduce((a, b) => a + b, 0); }\n"
            "export function discount(cents, percent) { return cents - Math.trunc(cents * percent / 100); }\n"
        ),
        "test/helpers.js": "export const ITEMS = [1, 2];\n",
    },
    {
        "price.js": (
            "export function total(items) { return items.reduce((a, b) => a + b, 0); }\n"
            "export function discount(cents, percent) { return cents - Math.round(cents * percent / 100); }\n"
        )
    },
    {
        "test/price.test.js": (
            "import test from 'node:test';\nimport assert from 'node:assert/strict';\n"
            "import { ITEMS } from './helpers.js';\nimport { discount, total } from '../price.js';\n\n"
            "test('total', () => {\n  assert.equal(total(ITEMS), 3);\n});\n\n"
            "test('discount rounds', () => {\n  assert.equal(discount(199, 50), 99);\n"
            "  assert.deepEqual([discount(101, 50), discount(100, 10)], [50, 90]);\n});\n"
        )
    },
    "npm test --silent 2>&1",
)
GO = Ecosystem(
    "go",
    "go",
    {
        "go.mod": "module shop\n\ngo 1.21\n",
        "price.go": (
            "package shop\n\nfunc Total(items []int) int {\n\tsum := 0\n"
            "\tfor _, item := range items {\n\t\tsum += item\n"
            "\t}\n\treturn sum\n}\n\nfunc Discount(cents, percent int) int {\n\treturn cents - cents*percent/100\n}\n"
        ),
    },
    {
        "price.go": (
            "package shop\n\nfunc Total(items []int) int {\n\tsum := 0\n"
            "\tfor _, item := range items {\n\t\tsum += item\n"
            "\t}\n\treturn sum\n}\n\nfunc Discount(cents, percent int) int {\n"
            "\treturn cents - (cents*percent+50)/100\n}\n"
        )
    },
    {
        "price_test.go": (
            'package shop\n\nimport "testing"\n\nfunc TestTotal(t *testing.T) {\n'
            '\tif got := Total([]int{1, 2}); got != 3 {\n\t\tt.Errorf("got %d", got)\n\t}\n}\n\n'
            "func TestDiscount(t *testing.T) {\n\tfor _, one := range []struct{ cents, percent, want int }{\n"
            "\t\t{cents: 199, percent: 50, want: 99},\n\t\t{cents: 101, percent: 50, want: 50},\n\t} {\n"
            "\t\tif got := Discount(one.cents, one.percent); got != one.want {\n"
            '\t\t\tt.Errorf("got %d, want %d", got, one.want)\n\t\t}\n\t}\n}\n'
        )
    },
    "export PATH=$PATH:/usr/local/go/bin GOCACHE=/tmp/go-cache GOTOOLCHAIN=local GOFLAGS=-vet=off\ngo test ./...",
)
JAVA = Ecosystem(
    "java",
    "javac",
    {
        "src/shop/Price.java": (
            "package shop;\n\npublic class Price {\n    public static int total(int... items) {\n        int sum = 0;\n"
            "        for (int item : items) sum += item;\n        return sum;\n    }\n\n"
            "    public static int discount(int cents, int percent) {\n        return cents - cents * percent / 100;\n"
            "    }\n}\n"
        ),
        "run-tests.sh": (
            "#!/bin/sh\nset -e\nrm -rf out && mkdir out\n"
            "javac -d out $(find src test -name '*.java')\nexec java -cp out shop.PriceTest\n"
        ),
    },
    {
        "src/shop/Price.java": (
            "package shop;\n\npublic class Price {\n    public static int total(int... items) {\n        int sum = 0;\n"
            "        for (int item : items) sum += item;\n        return sum;\n    }\n\n"
            "    public static int discount(int cents, int percent) {\n"
            "        return cents - (cents * percent + 50) / 100;\n    }\n}\n"
        )
    },
    {
        "test/shop/PriceTest.java": (
            "package shop;\n\npublic class PriceTest {\n    static void assertEquals(Object expected, Object found) {\n"
            '        if (!expected.equals(found)) throw new AssertionError(expected + " but " + found);\n    }\n\n'
            "    public static void main(String[] arguments) {\n        assertEquals(3, Price.total(1, 2));\n"
            "        assertEquals(99, Price.discount(199, 50));\n        assertEquals(50, Price.discount(101, 50));\n"
            '        System.out.println("3 tests passed");\n    }\n}\n'
        )
    },
    "sh run-tests.sh",
)
C = Ecosystem(
    "c",
    "gcc",
    {
        "price.h": "int total(const int *items, int count);\nint discount(int cents, int percent);\n",
        "price.c": (
            '#include "price.h"\n\nint total(const int *items, int count) {\n  int sum = 0;\n'
            "  for (int i = 0; i < count; i++) sum += items[i];\n  return sum;\n}\n\n"
            "int discount(int cents, int percent) { return cents - cents * percent / 100; }\n"
        ),
        "Makefile": (
            "CC = gcc\nCFLAGS = -O1 -Wall\n\n"
            "test: price.o\n\t$(CC) $(CFLAGS) -I. -o test_price tests/test_price.c price.o\n"
            "\t./test_price\n\nclean:\n\trm -f *.o test_price\n"
        ),
        "tests/check.h": (
            "#include <stdio.h>\n#include <stdlib.h>\n#define CHECK_EQ(found, expected) \\\n"
            '  if ((found) != (expected)) { printf("line %d failed\\n", __LINE__); exit(1); }\n'
        ),
    },
    {
        "price.c": (
            '#include "price.h"\n\nint total(const int *items, int count) {\n  int sum = 0;\n'
            "  for (int i = 0; i < count; i++) sum += items[i];\n  return sum;\n}\n\n"
            "int discount(int cents, int percent) { return cents - (cents * percent + 50) / 100; }\n"
        )
    },
    {
        "tests/test_price.c": (
            '#include "check.h"\n#include "price.h"\n\nint main(void) {\n  int items[] = {1, 2};\n'
            "  CHECK_EQ(total(items, 2), 3);\n  CHECK_EQ(discount(199, 50), 99);\n  CHECK_EQ(discount(101, 50), 50);\n"
            '  printf("3 checks passed\\n");\n  return 0;\n}\n'
        )
    },
    "make test",
)
ECOSYSTEMS = {one.name: one for one in (PYTHON, SEVERAL, CATALOGUE, NODE, GO, JAVA, C)}


@dataclass(frozen=True)
class Played:
    """The judgement of a patch. `result`: `not solved`, `rejected`, `solved` or `no verdict`."""

    result: str
    reason: str
    rule: str = ""
    findings: list[str] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)


@dataclass(frozen=True)
class Referee:
    """Plays patches on one ecosystem's task with what admission would know of it."""

    ecosystem: Ecosystem
    known: KnownRuns
    limits: GradingLimits

    def _judge(self) -> PatchJudge:
        return PatchJudge(GRADERS["eval_cmd"], self.ecosystem.task(), self.limits, self.known, controlled=True)

    async def play(self, fresh_box: FreshBox, patch: bytes, number: int) -> Played:
        """Judge a patch, and if it is solved, make the control runs, chosen by `number`."""
        judge = self._judge()
        try:
            judged = await judge_in_boxes(judge, fresh_box, patch)
            verdict: Verdict = judged.verdict
            named = [f"{finding.rule}: {finding.path} {finding.action}" for finding in judged.findings]
            if not verdict.solved:
                result = "rejected" if verdict.rejected else "not solved"
                return Played(result, verdict.reason, verdict.rule, named, judged.flags)
            for choice in self.known.control_runs(number):
                broken = None if choice is None else self.known.broken[choice]
                async with fresh_box() as box:
                    done = await judge.run(box, patch, broken, self.known.selected)
                if done.run is None:
                    return Played("no verdict", f"{done.not_run}", findings=named, flags=judged.flags)
                if broken is None:
                    again = judge.verdict(done, self.known.oracle)
                    if not again.solved:
                        return Played("not solved", f"not again: {again.reason}", again.rule, named, judged.flags)
                    continue
                found = judge_control(broken, done.run, by_exit=not done.selected)
                if not found.is_evidence:
                    return Played("not solved", "a control run gave no evidence", "", named, judged.flags)
                if found.passed:
                    reason = f"passed wrongly: {found.passed[0]}"
                    return Played("rejected", reason, "control_run", named, judged.flags)
        except GraderFailedError as error:
            return Played("no verdict", str(error))
        return Played("solved", "", "", named, judged.flags)


async def make_referee(ecosystem: Ecosystem, fresh_box: FreshBox, directory: Path, limits: GradingLimits) -> Referee:
    """Admit the task: record its oracle and make four broken oracles."""
    gold = patch_of(ecosystem, ecosystem.gold, directory)
    judge = PatchJudge(GRADERS["eval_cmd"], ecosystem.task(), limits, controlled=True)
    async with fresh_box() as box:
        done = await judge.run(box, gold)
    assert done.run is not None and done.run.observed.exit_code == 0, done
    oracle = judge.gold_oracle(done)
    async with fresh_box() as box:
        empty = EmptyRun.of_verdict(judge.verdict(await judge.run(box, b""), oracle), oracle)
    pool: dict[int, BrokenOracle] = {}
    confirmed: dict[int, BrokenOracle] = {}
    for number in range(12):
        async with fresh_box() as box:
            made = await judge.break_tests(box, gold, oracle, empty, number)
        if made.broken is not None and made.broken.is_valid:
            pool[number] = made.broken
        confirmed = confirmed_pool(pool)
        if len(confirmed) == 4:
            break
    assert confirmed, f"{ecosystem.name}: of 12 broken oracles {len(pool)} are valid and none is confirmed"
    selected = selectable_tests(confirmed.values(), oracle)
    if selected:
        async with fresh_box() as box:
            alone = await judge.run(box, gold, selected=selected)
        if judge.verdict(alone, oracle).solved:
            oracle = replace(oracle, selected=selected)
    return Referee(ecosystem, KnownRuns(oracle, confirmed), limits)


def patch_of(ecosystem: Ecosystem, edits: Edits, directory: Path, executable: tuple[str, ...] = ()) -> bytes:
    """Return the edits as a patch on the ecosystem's base."""
    directory.mkdir(parents=True, exist_ok=True)
    return shop.diff(directory, edits, executable, base=ecosystem.base)
