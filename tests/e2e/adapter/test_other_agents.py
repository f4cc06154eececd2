"""Agents that no harness starts, unmodified: the turns of each are one chain, with the thinking put back.

They are installed from npm and PyPI, which takes minutes; a test is skipped if that cannot be done.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.adapter.conftest import Testbed, call
from tests.e2e.adapter.feature_matrix import OTHER_AGENTS, OtherAgent

pytestmark = [pytest.mark.timeout(3000), pytest.mark.slow]
CONTINUE = """\
name: agent
version: 0.0.1
schema: v1
models:
  - name: policy
    provider: openai
    model: policy
    apiBase: {url}
    apiKey: {token}
    roles: [chat]
    capabilities: [tool_use]
"""
LLAMA_INDEX = """\
import asyncio
import subprocess

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def bash(command: str) -> str:
    "Run a command."
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


async def main() -> None:
    served = dict(model="policy", api_base="{url}", api_key="{token}", context_window=30000)
    model = OpenAILike(is_chat_model=True, is_function_calling_model=True, **served)
    print(await FunctionAgent(tools=[bash], llm=model).run("Make it so."))


asyncio.run(main())
"""


def install(agent: OtherAgent, directory: Path) -> Path:
    """Return the directory of the programs of the agent's packages."""
    is_npm = not any("==" in one for one in agent.packages)
    if is_npm:
        commands = [["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory)]]
    else:
        commands = [[sys.executable, "-m", "venv", str(directory)], [f"{directory}/bin/pip", "install", "--quiet"]]
    commands[-1] += agent.packages
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(str(error))
        if done.returncode:
            pytest.skip(done.stderr[-400:])
    return directory / ("node_modules/.bin" if is_npm else "bin")


def command_of(name: str, programs: Path, url: str, token: str) -> list[str]:
    """Return the command that has the agent work once. Its configuration is written beside its programs."""
    if name == "grok_cli":
        server = ["--base-url", url, "--api-key", token, "--model", "policy"]
        return [str(programs / "grok"), "--prompt", "Make it so.", *server]
    written = programs / ("config.yaml" if name == "continue" else "agent.py")
    written.write_text((CONTINUE if name == "continue" else LLAMA_INDEX).format(url=url, token=token))
    if name == "continue":
        return [str(programs / "cn"), "-p", "Make it so.", "--config", str(written), "--allow", "*"]
    return [str(programs / "python"), str(written)]


@pytest.mark.parametrize("name", OTHER_AGENTS)
async def test_its_turns_are_one_chain(name: str, testbed: Testbed, directory: Path) -> None:
    agent = OTHER_AGENTS[name]
    programs = install(agent, directory / "programs")
    opened = await testbed.open()
    await testbed.engine.say(
        "Writing.\n" + call(agent.shell, command="echo hi > a.txt"), call(agent.shell, command="cat a.txt"), "All done."
    )
    for folder in ("repo", "home"):
        (directory / folder).mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory / "home"), "LANG": "C.UTF-8"}
    process = await asyncio.create_subprocess_exec(
        *command_of(name, programs, f"{testbed.address}/v1", opened.token),
        cwd=directory / "repo",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 600)
    assert process.returncode == 0 and b"All done." in printed, printed[-2000:]
    assert (directory / "repo" / "a.txt").read_text() == "hi\n"
    assert [row.fork_cause for row in await testbed.rows(opened)] == ["root", None, None]
    calls = (await testbed.engine.seen())["calls"]
    decode = testbed.engine.renderer.tokenizer.plain.decode
    shown = [decode(one["ids"], skip_special_tokens=False).count("I look for the loop.") for one in calls]
    assert shown == [0, 1, 2], "thinking is put back"
