"""Grader `f2p_script`: run `metadata.remote_env_info.f2p_script`, which ends in `sys.exit(pytest.main(...))`."""

import base64

from grading.base import TestFiles, TestRun, Verdict
from grading.eval_cmd import judge_command, listed_test_files, run_test_command
from grading.oracle import Oracle
from ratchet.types import JsonObject
from sandboxes.base import Sandbox


def _script_command(script: str) -> str:
    """Return the shell command that runs the script from a directory of its own, apart from the patch's files."""
    encoded = base64.b64encode(script.encode()).decode()
    return (
        f'directory=$(mktemp -d) && echo {encoded} | base64 -d > "$directory/f2p_script.py"'
        ' && python "$directory/f2p_script.py"'
    )


class F2pScriptGrader:
    name = "f2p_script"
    version = "4"

    def test_files(self, spec: JsonObject) -> TestFiles:
        return listed_test_files(spec)

    async def run(self, box: Sandbox, workdir: str, spec: JsonObject, limit_seconds: float) -> TestRun:
        command = _script_command(spec["remote_env_info"]["f2p_script"])
        return await run_test_command(box, command, workdir, spec, limit_seconds, needs_pytest=True)

    def judge(self, run: TestRun, spec: JsonObject, oracle: Oracle | None) -> Verdict:
        return judge_command(run, "pytest", spec, oracle)
