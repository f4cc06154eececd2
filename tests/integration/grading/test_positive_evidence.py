"""A verdict needs evidence of the row's own kind: without any, a patch is neither solved nor a zero.

Each case runs in a real box with a wrong patch. Every command ends with 0 although no test ran, unless the case says
otherwise.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from activities.datasets.formats import read_rows
from grading.broken_oracles import BrokenOracle, judge_control
from grading.judge_patch import EmptyRun, GradingLimits, KnownRuns, PatchJudge
from grading.oracle import Oracle
from grading.registry import GRADERS
from ratchet.config import DatasetConfig
from ratchet.errors import GraderFailedError
from store.tasks import TaskRow
from tests.integration.boxes import FreshBox
from tests.integration.grading import shop
from tests.integration.grading.conftest import Judge, config
from tests.integration.grading.test_graders import pro_task

pytestmark = pytest.mark.timeout(1200)
WRONG: shop.Edits = {"shop/price.py": shop.TOTAL + shop.BUG + "\n"}
SOLUTION: shop.Edits = {"shop/price.py": shop.TOTAL + shop.FIX}
UNPARSED: shop.Edits = {"shop/price.py": shop.TOTAL + "def discount(cents, percent:\n    return 1\n"}
PYTEST = f"{shop.PYTHON} -B -m pytest -q -p no:cacheprovider"
_REWARD = "/logs/verifier/reward.txt"


def harbor_task(directory: Path, script: str, tests: str = shop.HIDDEN_TESTS, **spec: Any) -> TaskRow:
    """Return a Harbor task on the shop's repository."""
    task = directory / "harbor" / "t"
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text("discount must round")
    (task / "task.toml").write_text('[environment]\ndocker_image = "host"\nworkdir = "/workspace/shop"\n')
    (task / "tests" / "test.sh").write_text(script)
    (task / "tests" / "test_outputs.py").write_text(tests)
    (row,) = read_rows(DatasetConfig(path=str(task.parent)), "")
    known = {**row["spec"], "pre_commands": shop.task("eval_cmd", "").spec["pre_commands"], **spec}
    return TaskRow(0, row["label"], row["image"], row["workdir"], row["grader"], known)


def _by_exit_code(runner: str) -> str:
    return (
        f"cd /app 2>/dev/null || true\n{runner}\n"
        f"if [ $? -eq 0 ]; then echo 1 > {_REWARD}; else echo 0 > {_REWARD}; fi\nexit 0\n"
    )


IN_JSON = (
    f"mkdir -p /logs/verifier; PYTHONPATH=. {PYTEST} /tests/test_outputs.py; "
    '[ $? = 0 ] && r=1 || r=0; echo "{\\"reward\\": $r}" > /logs/verifier/reward.json\n'
)
NETWORK = (
    "apt-get update; apt-get install -y curl; curl -LsSf https://example.invalid/install.sh | sh\n"
    "source $HOME/.local/bin/env\n"
)
NO_VERDICT = {
    "the runner is not installed": (_by_exit_code("uvx --with pytest pytest -q /tests/test_outputs.py"), "uvx"),
    "the runner needs the network": (NETWORK + _by_exit_code("uvx pytest -q /tests"), "uvx"),
    "a pipe hides that the runner is missing": (_by_exit_code("uvx pytest -q /tests | tee /tmp/log"), "uvx"),
    "no reward file": (f"PYTHONPATH=. {PYTEST} /tests\nexit 0\n", "reward.txt"),
    "no reward file, another exit code": ("exit 3\n", "reward.txt"),
    "an empty reward file": (f": > {_REWARD}\n", "reward.txt is empty"),
    "a word": (f"echo solved > {_REWARD}\n", "solved"),
    "no number": (f"echo nan > {_REWARD}\n", "nan"),
    "a link": (f"echo 1 > /tmp/one; ln -s /tmp/one {_REWARD}\n", "reward.txt"),
    "a directory": (f"mkdir {_REWARD}\n", "reward.txt"),
    "a pipe without a writer": (f"mkfifo {_REWARD}\n", "reward.txt"),
    "json of another shape": ("echo '[1]' > /logs/verifier/reward.json\n", "reward.json"),
    "json that is cut off": ("echo '{\"reward\": ' > /logs/verifier/reward.json\n", "reward.json"),
}


@pytest.mark.parametrize("name", NO_VERDICT)
async def test_a_harbor_script_without_evidence_gives_no_verdict(
    judged: Judge, tree: Path, tmp_path: Path, name: str
) -> None:
    script, reason = NO_VERDICT[name]
    with pytest.raises(GraderFailedError, match=reason):
        await judged(harbor_task(tmp_path, script), shop.diff(tree, WRONG))


SOLVED = {
    "one": "echo 1",
    "with decimals": "echo 1.00",
    "with a line end of Windows": "printf '1\\r\\n'",
    "without a line end": "printf 1",
    "behind a blank line": "printf '\\n 1 \\n'",
}


@pytest.mark.parametrize("name", SOLVED)
async def test_a_reward_of_one_is_solved_with_any_exit_code(
    judged: Judge, tree: Path, tmp_path: Path, name: str
) -> None:
    task = harbor_task(tmp_path, f"PYTHONPATH=. {PYTEST} /tests && {SOLVED[name]} > {_REWARD}\nexit 7\n")
    verdict, _, _ = await judged(task, shop.diff(tree, SOLUTION))
    assert verdict.solved and len(verdict.tests) == 3, (verdict.reason, verdict.log)


LAYOUTS = {"json": IN_JSON, "text": _by_exit_code(f"PYTHONPATH=/workspace/shop {PYTEST} /tests")}


@pytest.mark.parametrize("name", LAYOUTS)
async def test_a_harbor_script_in_the_formats_own_layout(
    fresh_box: FreshBox, tmp_path: Path, tree: Path, name: str
) -> None:
    """`/tests` and `/logs/verifier`: the solution is solved and passes a control run, a wrong patch is not solved."""
    judge, gold = await _admitted(harbor_task(tmp_path, LAYOUTS[name]), fresh_box, tmp_path)
    async with fresh_box() as box:
        verdict = (await judge.judge(box, gold)).verdict
    assert verdict.solved and len(verdict.tests) == 3, (verdict.reason, verdict.log)
    assert not await _passes_control_run(judge, fresh_box, gold)
    async with fresh_box() as box:
        verdict = (await judge.judge(box, shop.diff(tree, WRONG))).verdict
    assert not verdict.solved and "failed" in verdict.tests.values(), (verdict.reason, verdict.log)


_CHECK = """import sys

sys.path.insert(0, "/workspace/shop")

from shop import discount

assert discount(199, 50) == 99
"""
_WRITES_THE_REWARD = f"""import os, time

if os.fork() == 0:
    os.setsid()
    while not os.path.exists("{_REWARD}") or open("{_REWARD}").read() != "0\\n":
        time.sleep(0.01)
    with open("{_REWARD}", "r+") as file:
        file.write("1")
    os._exit(0)
"""


async def test_a_patch_that_writes_the_reward_file_is_caught(fresh_box: FreshBox, tmp_path: Path, tree: Path) -> None:
    """The script's user is the product's, so a file alone is no proof: pytest's witness or a control run is. The
    script goes on for two seconds after its reward, in which the patch replaces it.
    """
    patch = shop.diff(tree, {"shop/price.py": _WRITES_THE_REWARD + shop.TOTAL + shop.BUG})
    script = _by_exit_code(f"PYTHONPATH=/workspace/shop {PYTEST} /tests").replace("exit", "sleep 2; exit")
    judge, gold = await _admitted(harbor_task(tmp_path, script), fresh_box, tmp_path)
    async with fresh_box() as box:
        assert not (await judge.judge(box, patch)).verdict.solved
    script = _by_exit_code(f"{shop.PYTHON} -B /tests/test_outputs.py").replace("exit", "sleep 2; exit")
    without = harbor_task(tmp_path / "without", script, tests=_CHECK)
    judge, gold = await _admitted(without, fresh_box, tmp_path / "without")
    assert not await _passes_control_run(judge, fresh_box, gold)
    async with fresh_box() as box:
        assert (await judge.judge(box, patch)).verdict.solved
    assert await _passes_control_run(judge, fresh_box, patch)


async def test_a_reward_file_that_was_there_before_does_not_count(judged: Judge, tree: Path, tmp_path: Path) -> None:
    task = harbor_task(tmp_path, "exit 0\n")
    stale = f"mkdir -p /logs/verifier && echo 1 > {_REWARD} && chmod -R a+rwX /logs"
    task.spec["pre_commands"].append(stale)
    with pytest.raises(GraderFailedError, match=_REWARD):
        await judged(task, shop.diff(tree, WRONG))
    (tmp_path / "patch").mkdir()
    brought = harbor_task(tmp_path / "patch", "exit 0\n", pre_commands=["mkdir -p /logs/verifier"])
    brought = replace(brought, workdir="/logs")
    with pytest.raises(GraderFailedError, match=_REWARD):
        await judged(brought, shop.diff(tree, {"verifier/reward.txt": "1\n"}, base={"README.md": ""}))


async def _admitted(task: TaskRow, fresh_box: FreshBox, directory: Path) -> "tuple[PatchJudge, bytes]":
    """Return a judge that knows what admission records, and the gold patch."""
    judge = PatchJudge(GRADERS[task.grader], task, GradingLimits.of_run(config()), controlled=True)
    (directory / "gold").mkdir()
    gold = shop.diff(directory / "gold", SOLUTION)
    async with fresh_box() as box:
        done = await judge.run(box, gold)
    assert done.run is not None
    oracle = Oracle.of_run(done.run.observed, done.run.outcomes)
    assert oracle.exit_code == 0, done.run.observed.log
    pool: dict[int, BrokenOracle] = {}
    for number in range(2):
        async with fresh_box() as box:
            made = await judge.break_tests(box, gold, oracle, EmptyRun([], []), number)
        assert made.broken is not None and made.broken.is_valid and made.broken.exit_fails, made.reason
        pool[number] = made.broken
    return replace(judge, known=KnownRuns(oracle, pool)), gold


async def _passes_control_run(judge: PatchJudge, fresh_box: FreshBox, patch: bytes) -> bool:
    async with fresh_box() as box:
        done = await judge.run(box, patch, judge.known.broken[0])
    assert done.run is not None
    return bool(judge_control(judge.known.broken[0], done.run).passed)


_SKIPPED = """import unittest

@unittest.skip("x")
class T(unittest.TestCase):
    def test_a(self): pass
""".replace("'", '"')
NOTHING_RAN = {
    "a missing runner": "no-such-runner tests || true",
    "a missing runner, then exit 0": "no-such-runner tests; exit 0",
    "a missing runner in a pipe": "no-such-runner tests | tee /tmp/log",
    "a missing runner in a script": "printf 'no-such-runner tests\\nexit 0\\n' > /tmp/run; bash /tmp/run",
    "a missing runner in a script of sh": "printf 'no-such-runner tests\\nexit 0\\n' > /tmp/run; sh /tmp/run",
    "a missing runner, another exit code": "no-such-runner tests || exit 1",
    "a missing script": "bash tests/no-such-script.sh || true",
    "a missing path": "./no-such-script.sh; true",
    "a missing module": f"{shop.PYTHON} -m no_such_runner tests || true",
    "pytest is missing": "/usr/bin/env -i PATH=/usr/bin no-such-python -m pytest || true",
    "pytest collects nothing": f"{PYTEST} -k no_such_test {shop.TESTS} || true",
    "pytest collects nothing, its exit code": f"{PYTEST} -k no_such_test {shop.TESTS}",
    "unittest runs nothing": f"{shop.PYTHON} -m unittest discover -s shop || true",
    "a target that is there": "touch built && make built",
    "a target without commands": "printf 'check:\\n' > /tmp/m && make -f /tmp/m check",
    "no rule for the target": "make no-such-target || true",
    "node's runner without tests": "mkdir -p /tmp/n && cd /tmp/n && node --test",
    "a missing package script": "npm run no-such-script || true",
    "jest without tests": "echo 'No tests found, exiting with code 0'",
    "cargo without tests": "printf 'running 0 tests\\n\\ntest result: ok. 0 passed; 0 failed; 0 ignored\\n'",
    "go without tests": "printf '?   \\tshop\\t[no test files]\\n'",
    "all are skipped": f"echo '{_SKIPPED}' > /tmp/test_skipped.py; cd /tmp; {shop.PYTHON} -m unittest -v test_skipped",
}


@pytest.mark.parametrize("name", NOTHING_RAN)
async def test_a_command_that_ran_no_test_gives_no_verdict(
    judged: Judge, tree: Path, test_patch: str, name: str
) -> None:
    task = shop.task("eval_cmd", test_patch, eval_cmd=NOTHING_RAN[name])
    with pytest.raises(GraderFailedError):
        await judged(task, shop.diff(tree, WRONG))


SCRIPTS = {
    "prints nothing": "pass\n",
    "cannot import pytest": "try:\n    import no_pytest\nexcept ImportError:\n    pass\n",
    "collects nothing": f"import pytest\npytest.main(['-q', '-k', 'no_such_test', {shop.TESTS!r}])\n",
    "prints nothing, without a witness": "pass\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_an_f2p_script_that_ran_no_test_gives_no_verdict(
    judged: Judge, tree: Path, test_patch: str, name: str
) -> None:
    task = shop.task("eval_cmd", test_patch, remote_env_info={"f2p_script": SCRIPTS[name]}, eval_cmd=None)
    if "without" in name:
        task.spec["integrity"] = {"witness": False}
    with pytest.raises(GraderFailedError):
        await judged(replace(task, grader="f2p_script"), shop.diff(tree, WRONG))


NO_LINES = {
    "a missing runner": {"test_cmd": "no-such-runner || true"},
    "an empty log": {"test_cmd": "true"},
    "an empty log, another exit code": {"test_cmd": "exit 1"},
    "another runner's log": {"test_cmd": "echo all is well", "log_parser": "unittest"},
    "pytest collects nothing": {"test_cmd": f"{PYTEST} -k no_such_test {shop.TESTS}"},
    "none of the listed tests ran": {"test_cmd": "echo PASSED tests/other.py::test_x"},
    "all are skipped": {"test_cmd": "".join(f"echo SKIPPED {name};" for name in [*shop.F2P, *shop.P2P])},
    "no test has to pass": {"fail_to_pass": []},
}


@pytest.mark.parametrize("name", NO_LINES)
async def test_a_list_of_which_no_test_ran_gives_no_verdict(
    judged: Judge, tree: Path, test_patch: str, name: str
) -> None:
    task = shop.task("swe_bench", test_patch)
    row = {**task.spec["swe_bench"], **NO_LINES[name]}
    with pytest.raises(GraderFailedError):
        await judged(replace(task, spec={**task.spec, "swe_bench": row}), shop.diff(tree, WRONG))


@pytest.mark.parametrize("found", ["", "{}", '{"tests": []}', '{"tests": [{"name": "other", "status": "PASSED"}]}'])
async def test_a_pro_parser_that_found_no_test_gives_no_verdict(judged: Judge, test_patch: str, found: str) -> None:
    parser = f"import sys\nopen(sys.argv[3], 'w').write({found!r})\n"
    with pytest.raises(GraderFailedError):
        await judged(pro_task(test_patch, run_script="echo nothing", parser_script=parser), b"")


_REPLACES_GETPID = """import os, shop
def test_pid(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert shop.discount(199, 50) == 99
"""
TESTS_RAN = {
    "a test replaces what the witness uses": f"cat > /tmp/test_pid.py <<'END'\n{_REPLACES_GETPID}END\n"
    f"PYTHONPATH=. {PYTEST} /tmp/test_pid.py",
    "a harmless missing command": f"no-such-helper; {PYTEST} {shop.TESTS}",
    "unittest beside a missing command": f"no-such-helper; {shop.PYTHON} -B -m unittest -v tests.test_price",
    "make has done a part": "touch built; make built && PYTHONPATH=. "
    f"{shop.PYTHON} -c 'from shop import discount; assert discount(199, 50) == 99; print(1)'",
    "nothing is printed": f"PYTHONPATH=. {shop.PYTHON} -c 'from shop import discount; assert discount(199, 50) == 99'",
}


@pytest.mark.parametrize("name", TESTS_RAN)
async def test_a_command_that_ran_tests_is_judged(judged: Judge, tree: Path, test_patch: str, name: str) -> None:
    tells_nothing = name in ("make has done a part", "nothing is printed")
    task = shop.task("eval_cmd", test_patch, eval_cmd=TESTS_RAN[name], empty_patch_fails=tells_nothing)
    for edits, solved in ((SOLUTION, True), (WRONG, False)):
        (tree / str(solved)).mkdir()
        verdict, _, _ = await judged(task, shop.diff(tree / str(solved), edits))
        assert verdict.solved == solved, (verdict.reason, verdict.log)


_OWN_ITEMS = """import pytest
class Sheet(pytest.File):
    def collect(self):
        yield Sum.from_parent(self, name="sum")
class Sum(pytest.Item):
    def runtest(self):
        import shop
        assert shop.discount(199, 50) == 99
def pytest_collect_file(file_path, parent):
    return Sheet.from_parent(parent, path=file_path) if file_path.suffix == ".sheet" else None
"""


async def test_tests_that_have_no_place_for_a_canary_reject_nothing(
    fresh_box: FreshBox, judged: Judge, tree: Path, test_patch: str
) -> None:
    """A success without a canary is no verdict; once the gold patch's runs had none either, it is solved."""
    command = f"mkdir /tmp/t && cd /tmp/t && cat > conftest.py <<'END'\n{_OWN_ITEMS}END\ntouch a.sheet && cd - && "
    task = shop.task("eval_cmd", test_patch, eval_cmd=f"{command} PYTHONPATH=. {PYTEST} /tmp/t")
    gold = shop.diff(tree, SOLUTION)
    with pytest.raises(GraderFailedError, match="admit the task"):
        await judged(task, gold)
    judge = PatchJudge(GRADERS["eval_cmd"], task, GradingLimits.of_run(config()))
    async with fresh_box() as box:
        done = await judge.run(box, gold)
    assert done.run is not None
    oracle = Oracle.of_run(done.run.observed, done.run.outcomes)
    assert oracle.canaries == ("unsupported",) and judge.verdict(done, oracle).solved
    (tree / "wrong").mkdir()
    verdict, _, _ = await judged(task, shop.diff(tree / "wrong", WRONG))
    assert not verdict.solved and not verdict.rejected, verdict.reason


_SKIPS_THE_UNKNOWN = """import pytest
known = set()
def pytest_collection_modifyitems(items):
    known.update(item.nodeid for item in items)
def pytest_runtest_setup(item):
    if item.nodeid not in known:
        pytest.skip("not selected")
"""


async def test_a_conftest_that_skips_the_canary_rejects_nothing(
    fresh_box: FreshBox, judged: Judge, tree: Path, test_patch: str
) -> None:
    """Honest work may skip tests by what it saw when they were collected. Its success is no verdict."""
    task = shop.task("eval_cmd", test_patch)
    judge = PatchJudge(GRADERS["eval_cmd"], task, GradingLimits.of_run(config()), controlled=True)
    async with fresh_box() as box:
        done = await judge.run(box, shop.diff(tree, SOLUTION))
    assert done.run is not None
    oracle = Oracle.of_run(done.run.observed, done.run.outcomes)
    (tree / "skips").mkdir()
    patch = shop.diff(tree / "skips", {**SOLUTION, "conftest.py": _SKIPS_THE_UNKNOWN})
    async with fresh_box() as box:
        with pytest.raises(GraderFailedError, match="no canary ran"):
            await replace(judge, known=KnownRuns(oracle)).judge(box, patch)


async def test_a_patch_that_a_log_names_is_not_solved(judged: Judge, tree: Path, test_patch: str) -> None:
    """No test ran, and the log shows by whose deed: the file that the patch changed does not parse."""
    task = shop.task("swe_bench", test_patch)
    command = f"{shop.PYTHON} -B -c 'import shop' && {shop.RUN}"
    row = {**task.spec["swe_bench"], "test_cmd": command}
    verdict, _, _ = await judged(replace(task, spec={**task.spec, "swe_bench": row}), shop.diff(tree, UNPARSED))
    assert not verdict.solved and not verdict.rejected and "shop/price.py" in verdict.log
