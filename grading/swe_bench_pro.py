"""Grader `swepro`: SWE-bench Pro's scripts, with the verdict made here.

As upstream: after the patch only the last line of `before_repo_set_cmd` runs (it takes test files from a later commit,
so the grading box keeps the repository's history), then the row's run script, then its parser.

Unlike upstream: the tests run unprivileged; a patch that does not apply has a verdict of its own; the parser runs after
all processes of the tests are dead, in an isolated interpreter; a test that was printed with two outcomes has failed;
if pytest ran, its witness must agree with the parsed log.
"""

import secrets
import shlex
import time

import orjson

from grading.base import TestFiles, TestRun, Verdict, tests_user
from grading.eval_cmd import names_pytest
from grading.evidence import all_tests, look_up
from grading.oracle import Oracle
from grading.run_hidden_tests import RUNNER_STATE, RunnerReport, run_tests
from grading.swe_bench import TestLists, judge_lists
from ratchet.errors import CommandFailedError, GraderFailedError
from ratchet.types import JsonObject
from sandboxes.base import Sandbox

_PARSER_SECONDS = 120.0


class SweBenchProGrader:
    name = "swepro"
    version = "5"

    def test_files(self, spec: JsonObject) -> TestFiles:
        row = spec["swepro"]
        paths = frozenset(
            name.partition("::")[0].partition(" |")[0].strip() for name in row["selected_test_files_to_run"]
        )
        lines = [line.strip() for line in row["before_repo_set_cmd"].strip().splitlines() if line.strip()]
        return TestFiles(paths, commands=tuple(lines[-1:]))

    async def run(self, box: Sandbox, workdir: str, spec: JsonObject, limit_seconds: float) -> TestRun:
        row = spec["swepro"]
        command = _command(row["run_script"], row["selected_test_files_to_run"], row.get("env_cmds") or "")
        started = time.monotonic()
        observed = await run_tests(box, command, workdir, limit_seconds, user=tests_user(spec))
        parsed = await _parse(box, row["parser_script"], observed)
        outcomes = confirm_outcomes(parsed, all_tests(observed))
        gap = TestLists.of_row(row).find_gap(observed, outcomes, names_pytest(row["run_script"]))
        return TestRun(observed, outcomes, time.monotonic() - started, limit_seconds, gap)

    def judge(self, run: TestRun, spec: JsonObject, oracle: Oracle | None) -> Verdict:
        row = spec["swepro"]
        return judge_lists(run, TestLists.of_row(row), oracle, names_pytest(row["run_script"]))


def confirm_outcomes(parsed: dict[str, str], seen: dict[str, str]) -> dict[str, str]:
    """Return the parsed tests with the outcomes that the witness saw; `parsed` if the witness saw none of them."""
    found = look_up(seen, parsed)
    return found if any(outcome != "missing" for outcome in found.values()) else parsed


def _command(run_script: str, test_files: list[str], env_cmds: str) -> str:
    end = f"END_{secrets.token_hex(8)}"
    files = shlex.quote(",".join(test_files))
    return f'{env_cmds}\nscript=$(mktemp) && cat > "$script" <<\'{end}\'\n{run_script}\n{end}\nbash "$script" {files}\n'


async def _parse(box: Sandbox, parser_script: str, observed: RunnerReport) -> dict[str, str]:
    """Run the row's `parser.py STDOUT STDERR OUTPUT` on the log. Raises GraderFailedError without a result."""
    directory = f"{RUNNER_STATE}/parser"
    await box.write_file(f"{directory}/parser.py", parser_script, user="root")
    await box.write_file(f"{directory}/stdout.log", observed.log, user="root")
    await box.write_file(f"{directory}/stderr.log", "", user="root")
    isolated = (
        "python=$(command -v python3 || command -v python || command -v /opt/ratchet/bin/python3)"
        ' && env -i PATH="$PATH" "$python" -I'
    )
    try:
        await box.exec(
            f"cd {directory} && {isolated} parser.py stdout.log stderr.log output.json",
            user="root",
            timeout=_PARSER_SECONDS,
        )
        parsed = orjson.loads(await box.read_file(f"{directory}/output.json", user="root"))
        tests = [(str(test["name"]), str(test["status"])) for test in parsed["tests"]]
    except (CommandFailedError, FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise GraderFailedError(f"swepro.parser_script gave no result: {error}") from error
    outcomes: dict[str, str] = {}
    for name, status in tests:
        passed = status == "PASSED" and outcomes.get(name, "passed") == "passed"
        outcomes[name] = "passed" if passed else "failed" if status != "SKIPPED" else "skipped"
    return outcomes
