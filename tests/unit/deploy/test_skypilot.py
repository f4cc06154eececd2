"""The task of SkyPilot: its head makes a cluster file and a config with the nodes' addresses; other nodes do nothing.

SkyPilot itself is too heavy for the environment: its fields are compared with those of its documentation. bash is real,
`ratchet` a stand-in that writes down how it was called.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stack.cluster import read_cluster

TASK = Path(__file__).parents[3] / "deploy/skypilot.yaml"
FIELDS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run"}


@pytest.fixture
def task() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(TASK.read_text())
    return found


def run(task: dict[str, Any], directory: Path, rank: int, addresses: str) -> None:
    program = directory / ".venv/bin/ratchet"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text('#!/bin/bash\necho "$STAMP $*" >>calls\n')
    program.chmod(0o755)
    (directory / "mine.yaml").write_text("engines: [{host: node-1}, {host: node-12}]\n")
    values = task["envs"] | {"CONFIG": "mine.yaml", "SHARED": str(directory / "shared")}
    values |= {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    values |= {"SKYPILOT_TASK_ID": "sky-1", "USER": "sky", "HOME": str(directory), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", task["run"]], cwd=directory, env=values, check=True)


def test_the_head_launches_over_the_other_nodes(task: dict[str, Any], tmp_path: Path) -> None:
    run(task, tmp_path, 0, "10.0.0.1\n10.0.0.2\n10.0.0.3")
    home = tmp_path / "shared/ratchet"
    cluster = read_cluster(home / "cluster.yaml")
    assert (cluster.head, cluster.user, cluster.ssh[0]) == ("10.0.0.1", "sky", "-i")
    assert cluster.num_gpus(8) == {"local": 8, "10.0.0.2": 8, "10.0.0.3": 8}
    assert yaml.safe_load((home / "launch.yaml").read_text()) == {
        "engines": [{"host": "10.0.0.2"}, {"host": "node-12"}]
    }
    calls = (tmp_path / "calls").read_text()
    assert calls == f"sky-1 launch {home}/cluster.yaml --config {home}/launch.yaml\n"


def test_one_node_is_a_head_without_hosts(task: dict[str, Any], tmp_path: Path) -> None:
    run(task, tmp_path, 0, "10.0.0.1")
    assert read_cluster(tmp_path / "shared/ratchet/cluster.yaml").hosts == {}


def test_other_nodes_start_nothing(task: dict[str, Any], tmp_path: Path) -> None:
    run(task, tmp_path, 1, "10.0.0.1\n10.0.0.2")
    assert not (tmp_path / "calls").exists() and not (tmp_path / "shared").exists()


def test_the_task_has_skypilots_fields_and_a_setup_that_bash_reads(task: dict[str, Any]) -> None:
    assert set(task) == FIELDS
    assert task["secrets"] == {"RATCHET_DATABASE_URL": None}, "asked for, never written here"
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)
    assert set(task["envs"]) == {"CONFIG", "SHARED", "MOUNT"}
