"""`ratchet launch` finds its hosts by HOSTFILE, with one address per line, and explains what it would start there."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from cli.launch import _name_services
from cli.main import run_app
from ratchet.errors import ConfigError
from stack.cluster import Cluster, ClusterHost
from stack.parts import POSTGRES_HOSTS

HOSTS = "10.0.0.2 slots=2\n10.0.0.3 slots=4\n"
RUN = """
datasets: [{path: tasks.jsonl}]
engines: [{host: 10.0.0.2, count: 2}]
training: {gpus: {10.0.0.3: [0, 1, 2, 3]}, workers: 4}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    metadata = {"image": "host", "workdir": "/w", "eval_cmd": "true"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "fix", "label": "a", "metadata": metadata}))
    (tmp_path / "rack").write_text(HOSTS)
    (tmp_path / "run.yaml").write_text(RUN)
    values = {"RATCHET_HOME": str(tmp_path / "home"), "RATCHET_DATABASE_URL": "postgresql://db.example.org/ratchet"}
    for name, value in (values | {"MASTER_ADDR": "10.0.0.1", "CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HOSTFILE", raising=False)
    return tmp_path / "run.yaml"


def launch(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["ratchet", "launch", *arguments, "--check"])
    return run_app()


@pytest.mark.parametrize("arguments", [[], ["--n-samples-per-prompt", "3"]])
def test_the_host_file_of_the_environment(
    arguments: list[str], config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOSTFILE", str(config.parent / "rack"))
    assert launch(monkeypatch, *arguments, "--config", str(config)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    engines = [["GPU", "0", "engine"], ["GPU", "1", "engine-2"]]
    learner = [["GPU", str(gpu), "learner"] for gpu in range(4)]
    assert lines[:8] == [["node", "10.0.0.2", "(2", "GPUs)"], *engines, ["node", "10.0.0.3", "(4", "GPUs)"], *learner]
    assert not (config.parent / "home").exists(), "nothing is started"


def test_a_host_of_the_config_that_the_file_does_not_list_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "rack").write_text("10.0.0.2 slots=2\n")
    monkeypatch.setenv("HOSTFILE", str(config.parent / "rack"))
    assert launch(monkeypatch, "--config", str(config)) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    assert "host 10.0.0.3 of engines or training.gpus is not among the cluster's: 10.0.0.2" in said


def test_the_default_host_file_is_read(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stack.cluster.DEFAULT_HOST_FILE", config.parent / "mpi_rack_hostfile")
    assert launch(monkeypatch, "--config", str(config)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "mpi_rack_hostfile" in said and "cannot be read" in said and "in the variable HOSTFILE" in said
    (config.parent / "rack").rename(config.parent / "mpi_rack_hostfile")
    for arguments in ([], ["--rollout-batch-size", "2"]):
        assert launch(monkeypatch, *arguments, "--config", str(config)) == 0


def test_a_list_of_hosts_places_every_part(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also without an address of Postgres, which the launch starts for its hosts."""
    config.write_text("datasets: [{path: tasks.jsonl}]")
    monkeypatch.setenv("HOSTFILE", str(config.parent / "rack"))
    monkeypatch.delenv("RATCHET_DATABASE_URL")
    assert launch(monkeypatch, "--config", str(config), "--engine-gpus", "4") == 0
    said = capsys.readouterr().out
    assert [said.count(f"   {part}") for part in ("engine", "learner")] == [4, 2]
    assert "on this machine: watcher, postgres, temporal" in said and "boxes: local" in said
    assert not (config.parent / "home").exists(), "nothing is started"


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("HF_CHECKPOINT", "no config.json"),
        ("PROMPT_DATA", "does not exist"),
        ("VIME_AGENT_CC_TARBALL", "is not a file"),
        ("REF_MODEL_PATH", "no config.json"),
    ],
)
@pytest.mark.parametrize("further", [["--check"], []])
def test_a_path_of_the_brief_that_holds_nothing_is_named_before_anything_starts(
    variable: str,
    words: str,
    further: list[str],
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = config.parent / "Qwen_torch_dist"
    monkeypatch.setenv(variable, str(place))
    monkeypatch.chdir(config.parent)  # the log would be written here
    arguments = ["--config", str(config), "--set", "harness.name=claude_code", "--kl-loss-coef", "0.1"]
    monkeypatch.setattr("sys.argv", ["ratchet", "launch", str(config.parent / "rack"), *arguments, *further])
    assert run_app() == 2
    said = " ".join(capsys.readouterr().err.split())
    assert str(place) in said and words in said
    assert not (config.parent / "home").exists(), "nothing is started"


def test_the_launchers_own_name_is_a_launch_from_any_directory(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "coding_agent_rl" / "run_qwen36_35b_a3b_swe_8nodes.sh"
    done = subprocess.run(["bash", script, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Train on a cluster" in done.stdout


@pytest.mark.parametrize("head", ["localhost", "127.0.1.1", "::1"])
def test_a_head_that_is_a_loopback_address_here_is_refused(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts gives a machine's own name the address 127.0.1.1."""
    for name, value in {
        "RATCHET_HOME": str(tmp_path),
        "RAY_ADDRESS": "",
        "MASTER_ADDR": "",
        POSTGRES_HOSTS: "",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RATCHET_DATABASE_URL", raising=False)
    with pytest.raises(ConfigError, match=f"head {head} has the loopback address .*MASTER_ADDR"):
        _name_services(Cluster(head=head, hosts={"10.0.0.2": ClusterHost()}))
    _name_services(Cluster(head="10.0.0.1", hosts={"10.0.0.2": ClusterHost()}))
    assert os.environ[POSTGRES_HOSTS] == "10.0.0.1 10.0.0.2"
