"""The grader's hidden tests are nowhere in the agent's box: an agent that searches for them finds nothing."""

import base64
import io
import tarfile

import pytest

from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import PRE, call, finish

pytestmark = pytest.mark.timeout(600)
MARKER = "hidden-8c1f2a"


def archive(name: str, content: bytes) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return base64.b64encode(buffer.getvalue()).decode()


async def test_the_agents_box_holds_nothing_of_the_grader(loop: Loop) -> None:
    """The search cannot find itself; the grader sees whether it found anything, and has the tests."""
    half = len(MARKER) // 2
    pattern = f'"{MARKER[:half]}""{MARKER[half:]}"'
    search = (
        f"grep -rIl {pattern} /workspace /tmp /run /home /var /etc /proc/self/environ 2>/dev/null >"
        f" found.txt; echo searched >> done.txt"
    )
    await loop.script(call(search), "Done.")
    spec = {
        "pre_commands": [PRE],
        "test_files": ["tests/test_it.sh"],
        "tests_archive": archive("tests/test_it.sh", f"echo {MARKER}\n".encode()),
        "gold_patch": MARKER,
        "eval_cmd": f"test -s done.txt && test ! -s found.txt && bash tests/test_it.sh | grep -q {MARKER}",
    }
    _, row = await finish(loop, await loop.start(loop.dataset(**spec)))
    assert (row.outcome, row.reward) == ("graded", 1.0), row.outcome_reason
