"""The example agent of docs/sandboxes.md works as the page shows it."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from activities.harnesses.base import HarnessSpec
from activities.harnesses.registry import HARNESSES, load_harness
from ratchet.types import AgentExit

PAGE = Path(__file__).resolve().parents[4] / "docs" / "sandboxes.md"


async def test_the_documented_agent_plugs_in_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_agent.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    harness = load_harness("my_agent:MyAgent")

    program = tmp_path / "bin" / "my-agent"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$*" "$(cat "$4")" $OPENAI_BASE_URL $OPENAI_API_KEY $MODEL $EXTRA $PWD\n')
    program.chmod(0o755)
    spec = HarnessSpec(
        adapter_base_url="http://127.0.0.1:1",
        model_name="policy",
        workdir=str(tmp_path),
        prompt="make it right",
        max_turns=7,
        step_timeout_seconds=1,
        time_budget_seconds=1,
        extra_env={"EXTRA": "more"},
    )
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in harness.configure(spec).items():
        (folder / name).write_bytes(content)
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin", "RATCHET_SESSION_TOKEN": "token"}
    done = subprocess.run(["/bin/sh", "command.sh"], cwd=folder, env=environment, capture_output=True, check=True)
    assert done.stdout.decode() == (
        f"--max-turns 7 --task-file {folder}/prompt.txt make it right http://127.0.0.1:1/v1 token policy more"
        f" {tmp_path}\n"
    )
    assert harness.read_transcript(done.stdout).num_turns == 1
    no_box: Any = None  # the page's agent does not use it
    assert await harness.read_exit(no_box, 1, 3, "") is AgentExit.TURN_LIMIT


def test_the_page_names_every_agent() -> None:
    page = PAGE.read_text()
    assert [name for name in HARNESSES if f"`{name}`" not in page] == []
