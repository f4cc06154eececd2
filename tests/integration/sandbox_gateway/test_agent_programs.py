"""An agent's tarball that the environment names gets into a box that has no such program, without a command for it."""

import asyncio
from pathlib import Path

import pytest

from activities.harnesses.agent_programs import claude_code_program, ensure_program
from ratchet.errors import ConfigError
from sandboxes.base import Sandbox
from stack.agent_programs import lay_out_tarballs
from tests.unit.activities.harnesses.test_agent_programs import SAYS, npm_tarball


async def test_a_tarball_is_uploaded_when_a_box_needs_it(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("VIME_AGENT_CC_TARBALL", str(npm_tarball(tmp_path / "cc.tgz", {"claude": SAYS})))
    program = claude_code_program()
    with pytest.raises(ConfigError, match="run `ratchet admin agents fetch claude-code`"):
        await ensure_program(box, program)
    lay_out_tarballs(print)  # as a worker does at its start
    await asyncio.gather(*(ensure_program(box, program) for _ in range(3)))
    said = await box.exec(program.box_path, user="agent")
    assert said.stdout == f"9.9.9 from {program.box_path}\n"
    assert (await box.exec("ls -A /opt/agents")).stdout == f"{program.directory_name}\n", "no half program is left"
