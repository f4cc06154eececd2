"""Grader `f2p_script`: run a Python file that ends in `sys.exit(pytest.main(...))`.

SWE-bench-like sets carry it in `metadata.remote_env_info.f2p_script`.
"""

import base64

from activities.graders.base import TestFiles, Verdict
from activities.graders.eval_cmd import grade_command, listed_test_files
from activities.sandboxes.base import Sandbox
from ratchet.types import JsonObject


def _script_command(script: str) -> str:
    """Return the shell command that runs the script from a directory of its own, without files of the patch beside it.

    The trailing comment makes `eval_cmd` require pytest's witness.
    """
    encoded = base64.b64encode(script.encode()).decode()
    return (
        f'directory=$(mktemp -d) && echo {encoded} | base64 -d > "$directory/f2p_script.py"'
        ' && python "$directory/f2p_script.py"  # pytest'
    )


class F2pScriptGrader:
    """The grader of `metadata.remote_env_info.f2p_script`."""

    name = "f2p_script"
    version = "1"

    def test_files(self, spec: JsonObject) -> TestFiles:
        return listed_test_files(spec)

    async def grade(self, box: Sandbox, workdir: str, spec: JsonObject, timeout_seconds: float) -> Verdict:
        command = _script_command(spec["remote_env_info"]["f2p_script"])
        return await grade_command(box, command, workdir, spec, timeout_seconds)
