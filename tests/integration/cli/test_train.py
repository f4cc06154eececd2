"""A mistake of the user gives one sentence with cause and remedy, exit code 2, no stack trace, and nothing half-made.

Each case runs the command in its own state directory; none gets as far as starting a part.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.ratchet_command import Ratchet

ROOT = Path(__file__).parents[3]
TASK = {"prompt": "fix it", "label": "a", "metadata": {"image": "host", "workdir": "/w", "eval_cmd": "true"}}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small disk, switches off namespaces")


@dataclass
class Machine:
    """A directory with a valid config, dataset and model, one of which a test then breaks."""

    directory: Path
    ratchet: Ratchet

    @property
    def home(self) -> Path:
        return self.directory / "home"

    def train(self, **environment: str) -> str:
        """Run `ratchet train` in this process, expect a refusal, and return the sentence."""
        variables = {"RATCHET_HOME": str(self.home), **environment}
        ended = self.ratchet("train", str(self.directory / "run.yaml"), **variables)
        return refusal(ended.code, ended.output, ended.error)

    def train_under(self, prefix: Sequence[str]) -> str:
        """Run `ratchet train` as a process that another program starts, expect a refusal, and return the sentence."""
        command = [*prefix, sys.executable, "-m", "cli.main", "train", str(self.directory / "run.yaml")]
        variables = {**os.environ, "RATCHET_HOME": str(self.home)}
        ended = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600, check=False
        )
        return refusal(ended.returncode, ended.stdout, ended.stderr)


def refusal(code: int, output: str, error: str) -> str:
    """Return the only sentence of a refused command."""
    assert code == 2, (code, output, error)
    assert "Traceback" not in error and output == ""
    lines = [line for line in error.splitlines() if line.startswith("ratchet: ")]
    assert len(lines) == 1, error
    return lines[0]


@pytest.fixture
def machine(tmp_path: Path, ratchet: Ratchet) -> Machine:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(f"model: {tmp_path}/model\ndatasets: [{{path: tasks.jsonl}}]\n")
    return Machine(tmp_path, ratchet)


def test_an_address_of_weights_that_cannot_be_used(machine: Machine) -> None:
    said = machine.train(RATCHET_TRAINING__WEIGHTS_ADDRESS="s4://bucket/weights")
    assert "training.weights_address: 's4://bucket/weights' has the unknown scheme 's4'; expected s3, gs, file" in said


def test_an_unknown_key(machine: Machine) -> None:
    with (machine.directory / "run.yaml").open("a") as file:
        file.write("trainning: {steps: 3}\n")
    assert "trainning: there is no such key; did you mean training?" in machine.train()
    assert not machine.home.exists()


def test_a_config_that_is_not_there(machine: Machine) -> None:
    (machine.directory / "run.yaml").unlink()
    assert "run.yaml: cannot be read (No such file or directory); name a YAML file" in machine.train()


def test_a_wrong_row(machine: Machine) -> None:
    with (machine.directory / "tasks.jsonl").open("a") as file:
        wrong = {**TASK, "metadata": {**TASK["metadata"], "workdir": "relative"}}  # type: ignore[dict-item]
        file.write(json.dumps(wrong) + "\n")
    assert "tasks.jsonl, row 2, field metadata.workdir: expected an absolute path, found 'relative'" in machine.train()
    assert not machine.home.exists()


def test_a_model_without_a_chat_template(machine: Machine) -> None:
    (machine.directory / "model" / "chat_template.jinja").unlink()
    assert "model has no chat template; add chat_template.jinja or" in machine.train()
    assert not (machine.home / "stack.json").exists()


def test_a_model_that_is_no_model(machine: Machine) -> None:
    (machine.directory / "model" / "config.json").unlink()
    assert "model has no config.json; name a Hugging Face model directory" in machine.train()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("engine: {tool_parser: qwen3_code}", "vLLM has no parser 'qwen3_code'"),
        ("engine: {reasoning_parser: qwen}", "vLLM has no parser 'qwen'"),
        ("grading: {reward: solvd}", "did you mean solved?"),
        ("grading: {reward: 'no_module:reward'}", "cannot be imported: No module named 'no_module'"),
        ("loss: {preset: 'no_module:loss'}", "cannot be imported: No module named 'no_module'"),
        ("training: {advantage: 'os:sep'}", "is not a function"),
        ("harness: {name: claude-code}", "did you mean claude_code?"),
    ],
)
def test_a_component_that_cannot_be_loaded(machine: Machine, line: str, named: str) -> None:
    """It is found before anything is started, and by `--dry-run`, too."""
    with (machine.directory / "run.yaml").open("a") as file:
        file.write(line + "\n")
    assert named in machine.train()
    assert not machine.home.exists()


def test_a_taken_port(machine: Machine) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        machine.home.mkdir()
        (machine.home / "ports.json").write_text(json.dumps({"postgres": port}))
        sentence = machine.train_under([])  # this process is another program then
    assert f"port {port} (postgres) is used by another program, process {os.getpid()} (" in sentence
    assert "stop that program, or remove the line from" in sentence
    assert not (machine.home / "supervisord.pid").exists()


def test_bubblewrap_is_missing(machine: Machine) -> None:
    tools = machine.directory / "bin"
    tools.mkdir()
    assert "`bwrap` is not on PATH; install it with" in machine.train(PATH=str(tools))
    assert not machine.home.exists()


@needs_root
def test_user_namespaces_are_switched_off(machine: Machine) -> None:
    unshare = shutil.which("unshare")
    assert unshare is not None
    switched_off = [
        unshare,
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"',
        "sh",
    ]
    assert "user namespaces are off; run `sysctl" in machine.train_under(switched_off)
    assert not machine.home.exists()


@pytest.fixture
def small_disk(machine: Machine) -> Iterator[None]:
    machine.home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(machine.home)], check=True)
    yield
    subprocess.run(["umount", str(machine.home)], check=True)


@needs_root
@pytest.mark.usefixtures("small_disk")
def test_a_full_disk(machine: Machine) -> None:
    assert "only 8 MiB are free on the disk of" in machine.train()
    assert list(machine.home.iterdir()) == []


def test_a_database_that_does_not_answer(machine: Machine) -> None:
    """It is found before any other part of the stack is started."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        url = f"postgresql://somebody:secret@127.0.0.1:{other.getsockname()[1]}/ratchet"
        sentence = machine.train(RATCHET_DATABASE_URL=url)
    assert "refuses connections" in sentence and "unset RATCHET_DATABASE_URL" in sentence
    assert "secret" not in sentence
    assert not (machine.home / "supervisord.pid").exists()


def test_a_temporal_that_does_not_answer(machine: Machine) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert f"Temporal at {address} does not answer" in machine.train(TEMPORAL_ADDRESS=address)
    assert not (machine.home / "supervisord.pid").exists()
