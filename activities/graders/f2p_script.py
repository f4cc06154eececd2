"""Grader `f2p_script`: a Python file that ends in `sys.exit(pytest.main(...))`, from `metadata.remote_env_info.f2p_script`.

Why here: rows of the SWE-bench-like sets carry their tests this way.
Called by: `activities/grade.py`.
"""

import base64
from typing import Any

from activities.graders.base import TestFiles, Verdict
from activities.graders.eval_cmd import grade_command, listed_test_files
from activities.sandboxes.base import Sandbox


def wrapped(script: str) -> str:
    """The shell command that runs the script by its own file, from the repository, with nothing of the patch beside it."""
    encoded = base64.b64encode(script.encode()).decode()
    return f'directory=$(mktemp -d) && echo {encoded} | base64 -d > "$directory/f2p_script.py" && python "$directory/f2p_script.py"  # pytest'


class F2pScriptGrader:
    name = "f2p_script"
    version = "1"

    def test_files(self, spec: dict[str, Any]) -> TestFiles:
        return listed_test_files(spec)

    async def grade(self, box: Sandbox, workdir: str, spec: dict[str, Any], timeout_seconds: float) -> Verdict:
        return await grade_command(box, wrapped(spec["remote_env_info"]["f2p_script"]), workdir, spec, timeout_seconds)
