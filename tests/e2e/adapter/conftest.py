"""Real agent programs on this machine with a real adapter and a scripted engine: no sandbox and no workflow.

How a CLI uses the adapter's protocols can only be seen with the CLI; only the model's output is scripted.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.harnesses.base import HarnessSpec, json_lines
from activities.harnesses.claude_code import ClaudeCode
from activities.harnesses.codex import Codex
from activities.harnesses.fetched_harness import EventsHarness
from activities.harnesses.opencode import OpenCode
from activities.harnesses.qwen_code import QwenCode
from adapter.prompt.renderer import Renderer
from adapter.settings import AdapterSettings
from store.database import Database
from tests.e2e.harnesses.conftest import require_program
from tests.integration.adapter.conftest import (  # noqa: F401  # fixtures
    Opened,
    ScriptedEngine,
    adapter_process,
    adapter_settings,
    open_rollout,
    register,
    shared_engine,
)
from tests.integration.adapter.test_dialects import stream_of
from tests.integration.conftest import postgres_url  # noqa: F401  # a fixture
from tests.standins.tiny_model import make_tokenizer
from tests.unit.adapter.prompt.test_prompt_builder import KEEPING


@dataclass(frozen=True)
class Cli:
    """One agent program. `tool` and `argument`: the names of its shell tool and of the tool's argument."""

    harness: type[EventsHarness]
    fetch: str
    tool: str
    argument: str

    def call(self, command: str) -> str:
        return call(self.tool, **{self.argument: command})


def call(tool: str, **arguments: Any) -> str:
    inner = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in arguments.items()
    )
    return f"<tool_call>\n<function={tool}>\n{inner}</function>\n</tool_call>"


THOUGHT = "<think>\nI look for the loop.\n</think>\n\n"


class ThinkingEngine(ScriptedEngine):
    """An engine whose model thinks before each answer."""

    def ids(self, text: str, stop: bool = True) -> list[int]:
        return super().ids(text if text.startswith("<think>") else THOUGHT + text, stop)


CLAUDE_CODE = Cli(ClaudeCode, "claude-code", "Bash", "command")
CODEX = Cli(Codex, "codex", "exec_command", "cmd")
OPENCODE = Cli(OpenCode, "opencode", "bash", "command")
QWEN_CODE = Cli(QwenCode, "qwen-code", "run_shell_command", "command")
CLIS = {"claude_code": CLAUDE_CODE, "codex": CODEX, "opencode": OPENCODE, "qwen_code": QWEN_CODE}


def each_agent(feature: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Run a test once per agent that has the feature of `feature_matrix.py`, with the arguments `cli` and `feature`."""
    return pytest.mark.parametrize(
        ("cli", "feature"), [(CLIS[name], value) for name, value in feature.items()], ids=list(feature)
    )


@dataclass
class RunningCli:
    """A CLI that runs in a new repository."""

    process: subprocess.Popen[bytes]
    workdir: Path
    output: Path

    async def end(self) -> list[dict[str, Any]]:
        """Wait until the CLI has ended by itself, and return its events."""
        try:
            await asyncio.wait_for(asyncio.to_thread(self.process.wait), 1500)
        finally:
            self.process.kill()
        return json_lines(self.output.read_bytes())


def start(cli: Cli, address: str, token: str, directory: Path, **changes: Any) -> RunningCli:
    """Start a CLI with the harness's command and configuration, with the program's path on this machine instead of the
    box's. Started again in the same directory, it finds what it has stored.
    """
    program = require_program(cli.fetch)
    workdir = directory / "repo"
    folder = directory / "run"
    for one in (workdir, folder, directory / "home"):
        one.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "init", "-q", str(workdir)], check=True)
    values: dict[str, Any] = {"model_name": "policy", "workdir": str(workdir), "prompt": "Make it so.", "max_turns": 30}
    spec = HarnessSpec(adapter_base_url=address, step_timeout_seconds=120, time_budget_seconds=600, **values | changes)
    for name, data in cli.harness().configure(spec).items():
        (folder / name).write_bytes(
            data.replace(program.box_path.encode(), str(program.host_directory / "bin" / program.command).encode())
        )
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory / "home"),
        "RATCHET_SESSION_TOKEN": token,
        "LANG": "C.UTF-8",
    }
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            ["/bin/sh", str(folder / "command.sh")], cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    return RunningCli(process, workdir, output)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory outside of pytest's own, which other pytest sessions delete while a program runs."""
    with tempfile.TemporaryDirectory(prefix="ratchet-cli-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@dataclass
class Testbed:
    """An adapter process, a scripted engine, and one session after the other.

    Shared by the tests, because starting an adapter takes longer than most conversations with it.
    """

    __test__ = False

    database: Database
    engine: ScriptedEngine
    settings: AdapterSettings
    num_rollouts: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    async def open(self, **limits: Any) -> Opened:
        """Open a session and reset the engine.

        The context has room for the CLIs' 50 KB of instructions, which are many tokens of the small test vocabulary.
        """
        self.num_rollouts += 1
        async with httpx.AsyncClient(timeout=60) as http:
            await http.post(self.engine.address + "/reset")
        return await open_rollout(
            self.database, self.num_rollouts, **{"max_context_tokens": 400_000, "max_response_tokens": 2000} | limits
        )

    async def rows(self, opened: Opened) -> list[Any]:
        """The session's turns, after checking that each has exactly the prompt that the engine saw.

        A delivery is recorded behind the answer's last byte, with which a program may end: the records are waited for,
        unless a killed adapter owes one.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                while any(row.state == "completed" and not row.delivered for row in await opened.turns()):
                    await asyncio.sleep(0.05)
        rows = await opened.turns()
        calls = {one["request_id"]: one["ids"] for one in (await self.engine.seen())["calls"]}
        for row in rows:
            if row.state == "completed":
                assert calls[f"turn-{row.id}"] == stream_of(rows, row)[: row.prompt_tokens].tolist()
        return rows

    async def wait_for_calls(self, number: int) -> None:
        """Wait until that many calls have reached the engine."""
        async with asyncio.timeout(1500):
            while len((await self.engine.seen())["calls"]) < number:
                await asyncio.sleep(0.1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template shows the thinking of all answers: without it, each turn of a program would fork."""
    directory = tmp_path_factory.mktemp("keeping")
    make_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(KEEPING)
    return directory


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> Renderer:
    return Renderer(model_dir)


def cli_settings(postgres_url: str, model_dir: Path) -> AdapterSettings:  # noqa: F811
    parsers = {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}
    return adapter_settings(postgres_url, model_dir, **parsers, ping_seconds=1.0, lease_seconds=3.0)


@pytest.fixture(scope="session")
async def testbed(
    postgres_url: str,  # noqa: F811
    model_dir: Path,
    renderer: Renderer,
    shared_engine: tuple[str, subprocess.Popen[bytes]],  # noqa: F811
) -> AsyncIterator[Testbed]:
    database = Database(postgres_url)
    settings = cli_settings(postgres_url, model_dir)
    registered = await register(database, renderer, *shared_engine)
    engine = ThinkingEngine(registered.id, registered.address, registered.process, registered.renderer)
    async with adapter_process(settings):
        yield Testbed(database, engine, settings)
    await database.close()
