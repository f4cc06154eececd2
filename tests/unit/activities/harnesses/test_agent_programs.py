"""Agent programs as layers: native packages, packages that need Node, and refused ones."""

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from activities.harnesses import agent_programs
from activities.harnesses.claude_code import ClaudeCode
from ratchet.errors import ConfigError
from stack.agent_programs import (
    fetch_program,
    installed_programs,
    lay_out_tarballs,
    missing_program,
    provide_program,
)

SAYS = "#!/bin/sh\necho 9.9.9 from $0\n"


def npm_tarball(path: Path, files: Mapping[str, str]) -> Path:
    package = {"name": "@anthropic-ai/claude-code", "version": "9.9.9"}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"package.json": json.dumps(package), **files}.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(text)
            info.mode = 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_native_tarball_becomes_a_layer_once(tmp_path: Path) -> None:
    environment = {"VIME_AGENT_CC_TARBALL": str(npm_tarball(tmp_path / "cc.tgz", {"claude": SAYS}))}
    program = agent_programs.claude_code_program(environment)
    directory = fetch_program(program, print)
    said = subprocess.run([directory / "bin" / "claude"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("9.9.9 ")
    assert program.version == "9.9.9"
    before = directory.stat().st_mtime_ns
    assert fetch_program(agent_programs.claude_code_program(environment), print) == directory
    assert directory.stat().st_mtime_ns == before
    assert [found["directory"] for found in installed_programs()] == [str(directory)]
    assert not [entry for entry in directory.parent.iterdir() if entry.is_dir() and entry != directory], (
        "a half-made layer was left"
    )


def test_another_tarball_is_another_layer(tmp_path: Path) -> None:
    first = agent_programs.claude_code_program(
        {"VIME_AGENT_CC_TARBALL": str(npm_tarball(tmp_path / "a.tgz", {"claude": SAYS}))}
    )
    second = agent_programs.claude_code_program(
        {"VIME_AGENT_CC_TARBALL": str(npm_tarball(tmp_path / "b.tgz", {"claude": SAYS}))}
    )
    assert len({first.box_path, second.box_path, agent_programs.claude_code_program({}).box_path}) == 3


def test_a_package_of_javascript_runs_in_the_node_beside_it(tmp_path: Path) -> None:
    node = tmp_path / "node.tar.xz"
    with tarfile.open(node, "w:xz") as archive:
        info = tarfile.TarInfo("node-v22-linux-x64/bin/node")
        info.size = len(SAYS)
        info.mode = 0o755
        archive.addfile(info, io.BytesIO(SAYS.encode()))
    script = npm_tarball(tmp_path / "cc.tgz", {"cli.js": "console.log(1)"})
    program = agent_programs.claude_code_program(
        {"VIME_AGENT_CC_TARBALL": str(script), "VIME_AGENT_NODE_TARBALL": str(node)}
    )
    directory = fetch_program(program, print)
    moved = directory.rename(tmp_path / "elsewhere")  # a box has it in another place
    node_here = moved / "node" / "bin" / "node"
    node_here.write_text('#!/bin/sh\necho "$@"\n')
    said = subprocess.run([moved / "bin" / "claude", "--help"], capture_output=True, text=True, check=True).stdout
    assert said == f"{moved}/package/cli.js --help\n"


def test_a_slow_fetch_says_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tarball = npm_tarball(tmp_path / "cc.tgz", {"claude": SAYS})
    npm = tmp_path / "bin" / "npm"  # of `npm pack --silent --pack-destination DIRECTORY PACKAGE`
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\nsleep 0.5\ncp {tarball} "$4"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("stack.agent_programs._REPORT_SECONDS", 0.1)
    said: list[str] = []
    fetch_program(agent_programs.claude_code_program({}), said.append)
    package = next(text for text in said if text.startswith("fetching "))
    assert [text for text in said if text.startswith(f"still {package}: ")], said
    assert said[-1].startswith(("unpacking ", "still unpacking ")), "nothing is said of what has ended"


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.tgz is not a file"):
        agent_programs.claude_code_program({"VIME_AGENT_CC_TARBALL": "/nowhere.tgz"})
    empty = npm_tarball(tmp_path / "cc.tgz", {"README.md": "nothing"})
    with pytest.raises(ConfigError, match=r"cc\.tgz holds neither"):
        fetch_program(agent_programs.claude_code_program({"VIME_AGENT_CC_TARBALL": str(empty)}), print)
    assert installed_programs() == []


def test_a_tarball_of_the_environment_is_there_when_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on each worker's machine, without a command of its own."""
    monkeypatch.setenv("VIME_AGENT_CC_TARBALL", str(npm_tarball(tmp_path / "cc.tgz", {"claude": SAYS})))
    assert missing_program("claude_code") == ""
    provide_program("claude_code", True, print)
    assert [found["agent"] for found in installed_programs()] == ["claude_code"]
    shutil.rmtree(agent_programs.agents_directory())
    lay_out_tarballs(print)
    assert [found["agent"] for found in installed_programs()] == ["claude_code"]


def test_a_worker_says_which_tarball_it_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_AGENT_CC_TARBALL", "/nowhere.tgz")
    monkeypatch.setenv("RATCHET_CODEX_TARBALL", str(npm_tarball(tmp_path / "codex.tgz", {"README.md": "nothing"})))
    said: list[str] = []
    lay_out_tarballs(said.append)
    assert [text for text in said if "nowhere.tgz is not a file" in text]
    assert [text for text in said if "codex.tgz holds neither" in text]


@pytest.mark.parametrize(
    ("harness", "remedy"),
    [
        ("claude_code", "`ratchet admin agents fetch claude-code`, or name a tarball in VIME_AGENT_CC_TARBALL"),
        ("codex", "`ratchet admin agents fetch codex`, or name a tarball in RATCHET_CODEX_TARBALL"),
        ("qwen_code", "`ratchet admin agents fetch qwen-code`"),
    ],
)
def test_a_program_that_is_not_here_is_named_when_a_run_starts(
    harness: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes of the own gateway have programs of this machine only; the image of a service's box may contain one."""
    for name in ("VIME_AGENT_CC_TARBALL", "SWE_CC_TARBALL", "SLIME_AGENT_CC_TARBALL", "RATCHET_CODEX_TARBALL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as refused:
        provide_program(harness, True, print)
    assert str(refused.value).startswith(f"harness.name: {harness} is not on this machine")
    assert str(refused.value).endswith(remedy)
    provide_program(harness, False, pytest.fail)
    assert missing_program(harness).endswith(remedy), "said at every start"


@pytest.mark.parametrize("harness", ["bash_agent", "my_package.my_agent:MyAgent"])
def test_a_program_that_ratchet_does_not_fetch_is_not_missed(harness: str) -> None:
    provide_program(harness, True, pytest.fail)


def test_an_agent_of_ones_own_that_is_another_ones_has_its_program() -> None:
    class Mine(ClaudeCode):
        name = "mine"

    assert Mine().version == ClaudeCode().version
