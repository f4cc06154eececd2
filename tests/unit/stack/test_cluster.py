"""The hosts of a launch, from a host file as MPI has it or from YAML."""

import os
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.start_variables import start_variables
from stack.cluster import Cluster, read_cluster, require_hosts
from stack.placement import place
from stack.ray_nodes import node_command


def write(directory: Path, text: str, name: str = "hosts") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def config(**values: Any) -> RunConfig:
    return RunConfig.model_validate({"datasets": [{"path": "x"}], **values})


def test_a_host_file_has_one_address_per_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    found = read_cluster(write(tmp_path, "# rack 4\n10.0.0.2\n\n10.0.0.3 slots=8  # a note\n"))
    assert found.head == "10.0.0.1" and found.num_gpus(0) == {"local": 0, "10.0.0.3": 8}
    monkeypatch.delenv("MASTER_ADDR")
    assert read_cluster(write(tmp_path, "127.0.0.2\n")).head.startswith("127."), "the address on the way there"


def test_the_list_may_contain_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    found = read_cluster(write(tmp_path, "127.0.0.1 slots=4\n127.0.0.2 slots=8\n"))
    assert list(found.hosts) == ["127.0.0.2"] and found.num_gpus(8) == {"local": 8, "127.0.0.2": 8}
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    found = read_cluster(write(tmp_path, "10.0.0.1\n10.0.0.2 slots=8\n"))
    assert list(found.hosts) == ["10.0.0.2"] and found.num_gpus(3) == {"local": 3, "10.0.0.2": 8}
    only = read_cluster(write(tmp_path, "10.0.0.1 slots=8\n"))
    assert (only.head, only.hosts) == ("10.0.0.1", {})


def test_a_host_file_may_be_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch job of one node has no other host."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    found = read_cluster(write(tmp_path, "\n"))
    assert (found.head, found.hosts) == ("127.0.0.1", {})


def test_a_yaml_file_names_ports_and_users(tmp_path: Path) -> None:
    text = "head: 10.0.0.1\nhosts: {10.0.0.2: {gpus: 8}, 10.0.0.3: }\nuser: train\nssh: [-p, '2222']\n"
    found = read_cluster(write(tmp_path, text, "cluster.yaml"))
    assert (found.user, found.ssh, found.hosts["10.0.0.3"].gpus) == ("train", ("-p", "2222"), None)
    assert list(read_cluster(write(tmp_path, "head: a\nhosts: [b, c]", "c.yaml")).hosts) == ["b", "c"]
    assert read_cluster(write(tmp_path, "head: a\nhosts:\n", "c.yaml")).hosts == {}


@pytest.mark.parametrize(("text", "name", "named"), [
    ("10.0.0.2\nnode-3\n", "hosts", "line 2: expected an IP address"),
    ("10.0.0.2 slots=many\n", "hosts", "line 1"),
    ("- a\n", "c.yaml", "expected a mapping"),
    ("hosts: [\n", "c.yaml", "is not YAML"),
    ("head: a\nhosts: [b]\nprot: 1\n", "c.yaml", "prot: there is no such key"),
    ("head: a\nhosts: [b]\nlost_seconds: 9\n", "c.yaml", "lost_seconds"),
    ("head: a\nhosts: [b]\nlost_seconds: .inf\n", "c.yaml", "lost_seconds"),
])  # fmt: skip
def test_a_wrong_line_is_named(text: str, name: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_cluster(write(tmp_path, text, name))
    assert named in str(refused.value)


def test_parts_and_hosts_must_fit() -> None:
    cluster = Cluster.model_validate({"head": "10.0.0.1", "hosts": {"10.0.0.2": {}}})
    require_hosts(cluster, config(engines=[{"host": "10.0.0.2"}]))
    with pytest.raises(ConfigError, match=r"host 10.0.0.7 of engines or training.gpus is not among"):
        require_hosts(cluster, config(engines=[{"host": "10.0.0.7"}]))
    with pytest.raises(ConfigError, match=r"host 10.0.0.2 has no part"):
        require_hosts(cluster, config(training={"gpus": {"local": [0]}}))


def test_a_host_of_boxes_is_no_ray_node_unless_its_gpus_are_given(tmp_path: Path) -> None:
    text = "head: 10.0.0.1\nhosts: {10.0.0.2: {boxes: true}, 10.0.0.3: {gpus: 0, boxes: false}}\n"
    cluster = read_cluster(write(tmp_path, text, "cluster.yaml"))
    assert (cluster.box_hosts, cluster.ray_hosts) == (["10.0.0.2"], ["10.0.0.3"])
    require_hosts(cluster, config(training={"gpus": {"10.0.0.3": [0]}}))
    with pytest.raises(ConfigError, match=r"host 10.0.0.2 has boxes only; give its number of GPUs"):
        require_hosts(cluster, config(engines=[{"host": "10.0.0.2"}]))
    both = Cluster.model_validate({"head": "a", "hosts": {"b": {"gpus": 0, "boxes": True}, "c": {"boxes": True}}})
    assert (both.box_hosts, both.ray_hosts) == (["b", "c"], ["b"])
    require_hosts(both, config())


def test_a_node_offers_the_learners_gpus_and_no_others(tmp_path: Path) -> None:
    values = {"head": "10.0.0.1", "hosts": {"10.0.0.2": {"gpus": 4}}, "user": "train", "directory": tmp_path}
    cluster = Cluster.model_validate(values)
    engines = [{"host": "10.0.0.2", "gpus": [0, 1], "args": ["-tp", "2"]}]
    placed = place(config(engines=engines, training={"gpus": {"10.0.0.2": [2, 3]}}), 2, cluster.num_gpus(0))
    command = node_command(cluster, placed, "10.0.0.2")
    assert command[0] == "ssh" and "train@10.0.0.2" in command
    assert "CUDA_VISIBLE_DEVICES=2,3" in command[-1] and "--num-gpus=2" in command[-1]
    assert "PYTORCH_ALLOC_CONF" not in command[-1]
    assert "--num-gpus=0" in node_command(cluster, placed, "local")[-1]


def test_ranks_leave_the_memory_of_shared_gpus_to_engines(tmp_path: Path) -> None:
    values = {"head": "10.0.0.1", "hosts": {"10.0.0.2": {"gpus": 2}}, "directory": tmp_path}
    cluster = Cluster.model_validate(values)
    engines = [{"host": "10.0.0.2", "gpus": [0], "args": ["--gpu-memory-utilization", "0.5"]}]
    placed = place(config(engines=engines, training={"gpus": {"10.0.0.2": [0, 1]}}), 2, cluster.num_gpus(0))
    command = node_command(cluster, placed, "10.0.0.2")[-1]
    assert "CUDA_VISIBLE_DEVICES=0,1" in command and "per_process_memory_fraction:0.45" in command


def test_every_node_starts_with_the_variables_of_our_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and engines inherit those of their node."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    cluster = Cluster.model_validate({"head": "10.0.0.1", "hosts": {"10.0.0.2": {"gpus": 1}}})
    placed = place(config(training={"gpus": {"10.0.0.2": [0]}}), 1, cluster.num_gpus(0))
    for host in ("local", "10.0.0.2"):
        command = node_command(cluster, placed, host)[-1]
        for name, value in start_variables(os.environ).items():
            assert f"{name}={value}" in command
        assert "OMP_WAIT_POLICY=ACTIVE" in command
