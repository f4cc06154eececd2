"""Each grader's verdict on the same task: solved, not solved, broken, timed out."""

import base64
from dataclasses import replace
from pathlib import Path

import pytest

from activities.datasets.formats import read_rows
from examples.tiny_policy.bug_tasks import FAMILIES
from grading.broken_oracles import judge_control
from grading.judge_patch import GradingLimits, KnownRuns, PatchJudge
from grading.registry import GRADERS
from ratchet.config import DatasetConfig
from ratchet.errors import GraderFailedError
from store.admissions import TaskOracle
from store.tasks import TaskRow
from tests.integration.boxes import FreshBox
from tests.integration.grading import shop
from tests.integration.grading.conftest import Judge, config

pytestmark = pytest.mark.timeout(1200)
HELD_OUT = Path(__file__).parents[3] / "datasets" / "quickstart" / "heldout.jsonl"
SOLUTION: shop.Edits = {"shop/price.py": shop.TOTAL + shop.FIX}


@pytest.mark.parametrize("grader", ["swe_bench", "eval_cmd"])
async def test_the_gold_patch_is_solved(judged: Judge, tree: Path, test_patch: str, grader: str) -> None:
    verdict, findings, _ = await judged(shop.task(grader, test_patch), shop.diff(tree, SOLUTION))
    assert verdict.solved and not findings, (verdict.reason, verdict.log)
    assert {verdict.tests[name] for name in [*shop.F2P, *shop.P2P]} == {"passed"}


@pytest.mark.parametrize("option", ["-p no:legacypath", "-c /dev/null --rootdir /tmp", "--import-mode=importlib"])
async def test_the_gold_patch_is_solved_under_other_options(
    judged: Judge, tree: Path, test_patch: str, option: str
) -> None:
    command = f"PYTHONPATH=. {shop.RUN} {option}"
    verdict, _, _ = await judged(shop.task("eval_cmd", test_patch, eval_cmd=command), shop.diff(tree, SOLUTION))
    assert verdict.solved and len(verdict.tests) == 3, (verdict.reason, verdict.log)


@pytest.mark.parametrize("grader", ["swe_bench", "eval_cmd"])
async def test_the_empty_patch_is_not(judged: Judge, test_patch: str, grader: str) -> None:
    verdict, _, _ = await judged(shop.task(grader, test_patch), b"")
    assert not verdict.solved and not verdict.rejected
    assert verdict.tests[shop.F2P[0]] == "failed" and verdict.tests[shop.P2P[0]] == "passed", verdict.log


@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_what_the_quickstarts_rows_say_of_themselves_is_true(fresh_box: FreshBox, family: str) -> None:
    """One held-out task of each family: an empty patch is not solved, the gold patch is, and a control run catches a
    patch only if it passes the row's broken oracle."""
    rows = read_rows(DatasetConfig(path=str(HELD_OUT)), "")
    row = next(row for row in rows if row["spec"]["family"] == family)
    task = TaskRow(0, row["label"], row["image"], row["workdir"], row["grader"], row["spec"])
    known = KnownRuns.of_task(TaskOracle(None, {}), task.spec)
    judge = PatchJudge(GRADERS[task.grader], task, GradingLimits.of_run(config()), known)
    assert task.spec["empty_patch_fails"] is True
    async with fresh_box() as box:
        verdict, _, _ = await judge.judge(box, b"")
    assert not verdict.solved and "failed" in verdict.tests.values(), verdict.log
    gold = task.spec["gold_patch"].encode()
    async with fresh_box() as box:
        verdict, findings, _ = await judge.judge(box, gold)
    assert verdict.solved and not findings, (verdict.reason, verdict.log)
    choices = known.control_choices()
    # A truth value has one neighbour, so that the tests of some families have fewer than two edits in a direction.
    assert len(choices) == 2 and all(1 <= len(numbers) <= 2 for numbers in choices)
    broken = known.broken[choices[sorted(FAMILIES).index(family) % 2][0]]
    async with fresh_box() as box:
        done = await judge.run(box, gold, broken)
    assert done.run is not None and judge_control(broken, done.run) == ([], 2, True), done.run


async def test_an_f2p_script_is_run_as_its_own_program(judged: Judge, tree: Path, test_patch: str) -> None:
    task = shop.task("eval_cmd", test_patch)
    script = f"import sys\n\nimport pytest\n\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {shop.TESTS!r}]))\n"
    spec = {**task.spec, "remote_env_info": {"f2p_script": script}, "eval_cmd": None}
    verdict, _, _ = await judged(replace(task, grader="f2p_script", spec=spec), shop.diff(tree, SOLUTION))
    assert verdict.solved and len(verdict.tests) == 3, (verdict.reason, verdict.log)


async def test_an_f2p_script_and_the_empty_patch(judged: Judge, test_patch: str) -> None:
    task = shop.task("eval_cmd", test_patch)
    script = f"import sys\n\nimport pytest\n\nsys.exit(pytest.main(['-q', {shop.TESTS!r}]))\n"
    verdict, _, _ = await judged(
        replace(task, grader="f2p_script", spec={**task.spec, "remote_env_info": {"f2p_script": script}}), b""
    )
    assert not verdict.solved and verdict.tests[shop.F2P[0]] == "failed", (verdict.reason, verdict.log)


_LATER = f"""
echo {base64.b64encode(shop.HIDDEN_TESTS.encode()).decode()} | base64 -d > {shop.TESTS}
git add -A && git -c user.name=x -c user.email=x@x commit -qm later && git tag later && git reset -q --hard HEAD~1
"""
_PARSER = """
import json, re, sys
found = re.findall(r"^(PASSED|FAILED) (\\S+)", open(sys.argv[1]).read(), re.MULTILINE)
json.dump({"tests": [{"name": name, "status": status} for status, name in found]}, open(sys.argv[3], "w"))
"""


def pro_task(test_patch: str, **changes: object) -> TaskRow:
    """As in SWE-bench Pro, the tests are in a later commit; a first line that would undo the patch must not run."""
    task = shop.task("eval_cmd", test_patch)
    row = {
        "before_repo_set_cmd": f"git reset --hard HEAD\ngit clean -fdx\ngit checkout later -- {shop.TESTS}",
        "selected_test_files_to_run": [shop.TESTS],
        "fail_to_pass": shop.F2P,
        "pass_to_pass": shop.P2P,
        "run_script": f"{shop.PYTHON} -B -m pytest -rA -q -p no:cacheprovider ${{1//,/ }}",
        "parser_script": _PARSER,
    }
    spec = {
        "pre_commands": [task.spec["pre_commands"][0] + _LATER],
        "problem_statement": "x",
        "swepro": {**row, **changes},
    }
    return replace(task, grader="swepro", spec=spec)


async def test_swe_bench_pro_solved(judged: Judge, tree: Path, test_patch: str) -> None:
    verdict, _, _ = await judged(pro_task(test_patch), shop.diff(tree, SOLUTION))
    assert verdict.solved and (verdict.fail_to_pass, verdict.pass_to_pass) == ((2, 2), (1, 1)), (
        verdict.reason,
        verdict.log,
    )


async def test_swe_bench_pro_counts_what_fails(judged: Judge, test_patch: str) -> None:
    verdict, _, _ = await judged(pro_task(test_patch), b"")
    assert not verdict.solved and (verdict.fail_to_pass, verdict.pass_to_pass) == ((0, 2), (1, 1)), (
        verdict.reason,
        verdict.log,
    )


async def test_swe_bench_pro_does_not_believe_what_was_printed(judged: Judge, tree: Path, test_patch: str) -> None:
    lie = "".join(f"print('PASSED {name}')\n" for name in shop.F2P)
    verdict, _, _ = await judged(pro_task(test_patch), shop.diff(tree, {"shop/price.py": lie + shop.TOTAL + shop.BUG}))
    assert not verdict.solved and verdict.fail_to_pass == (0, 2), (verdict.reason, verdict.log)


async def test_a_parser_that_breaks_is_no_verdict(judged: Judge, test_patch: str) -> None:
    with pytest.raises(GraderFailedError, match="parser_script gave no result"):
        await judged(pro_task(test_patch, parser_script="raise SystemExit(1)"), b"")


async def test_another_runner_is_read_from_its_log(judged: Judge, tree: Path, test_patch: str) -> None:
    task = shop.task("swe_bench", test_patch)
    name = "test_cart_discount (tests.test_price.TestCart.test_cart_discount)"
    own = {"test_cmd": f"{shop.PYTHON} -B -m unittest -v tests.test_price", "log_parser": "unittest"}
    row = {**task.spec["swe_bench"], **own, "fail_to_pass": [name], "pass_to_pass": []}
    verdict, _, _ = await judged(replace(task, spec={**task.spec, "swe_bench": row}), shop.diff(tree, SOLUTION))
    assert verdict.solved and verdict.tests == {name: "passed"}, (verdict.reason, verdict.log)


async def test_tests_that_run_out_of_time_are_not_solved(judged: Judge, test_patch: str) -> None:
    verdict, _, _ = await judged(shop.task("eval_cmd", test_patch, eval_cmd="sleep 600"), b"", eval_seconds=2)
    assert not verdict.solved and "took longer than 2 s" in verdict.reason


async def test_a_command_that_cannot_run_is_no_verdict(judged: Judge, test_patch: str) -> None:
    with pytest.raises(GraderFailedError, match="could not run"):
        await judged(shop.task("eval_cmd", test_patch, eval_cmd="no-such-program"), b"")
