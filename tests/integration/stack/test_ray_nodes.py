"""A cluster of Ray nodes over a real sshd: it comes up, survives a dead node, and ends without a trace.

The hosts are loopback addresses; skipped if there is no sshd (Debian's package openssh-server).
"""

import getpass
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from ratchet.config import RunConfig
from ratchet.errors import MachineError
from stack import host_process
from stack import ray_nodes as module
from stack.cluster import Cluster
from stack.placement import place
from stack.ports import free_port
from stack.ray_nodes import ray_nodes
from tests.network_hosts import ssh_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HOSTS = ("127.0.0.3", "127.0.0.4")


@pytest.fixture
def ssh_options() -> Iterator[tuple[str, ...]]:
    with ssh_server(HOSTS, free_port()) as options:
        yield options


def ray_processes(port: int) -> list[psutil.Process]:
    """Return what belongs to the cluster at this port."""
    found = []
    for process in psutil.process_iter():
        try:
            if f":{port}" in (words := " ".join(process.cmdline())) or f"ray-{os.getuid()}-{port}" in words:
                found.append(process)
        except psutil.Error:
            continue
    return found


def eventually(holds: Callable[[], bool], what: str, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.2)


def test_a_cluster_comes_up_over_ssh_and_leaves_nothing(
    ssh_options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(host_process, "_AGAIN_SECONDS", 0.1)
    config = RunConfig.model_validate(
        {"datasets": [{"path": "x"}], "training": {"gpus": {HOSTS[0]: [1, 3], HOSTS[1]: [0]}}}
    )
    hosts = {host: {} for host in HOSTS}
    values = {"head": "127.0.0.2", "hosts": hosts, "user": getpass.getuser(), "ssh": ssh_options, "port": free_port()}
    cluster = Cluster.model_validate(values)
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    said: list[str] = []

    def gpus() -> dict[str, float]:
        return {node["NodeManagerAddress"]: node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]}

    with ray_nodes(cluster, place(config, 3, {"local": 0}), said.append, lambda name, line: None):
        ray.init(address=cluster.ray_address, logging_level="ERROR", log_to_driver=False)
        try:
            assert gpus() == {"127.0.0.2": 0.0, HOSTS[0]: 2.0, HOSTS[1]: 1.0}
            raylet = next(
                one
                for one in ray_processes(cluster.port)
                if one.name() == "raylet" and f"--node_ip_address={HOSTS[1]}" in one.cmdline()
            )
            raylet.send_signal(signal.SIGKILL)
            eventually(lambda: any(HOSTS[1] in line and "starting again" in line for line in said), "it is noticed")
            eventually(lambda: len(gpus()) == 3 and gpus()[HOSTS[1]] == 1.0, "the node is back")
        finally:
            ray.shutdown()
    eventually(lambda: not ray_processes(cluster.port), "every process of the cluster has ended", 60)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_host_that_refuses_is_named(ssh_options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_START_SECONDS", 30.0)
    values = {"head": "127.0.0.2", "hosts": {"127.0.0.9": {}}, "ssh": ssh_options, "port": free_port()}
    cluster = Cluster.model_validate(values)
    placement = place(RunConfig.model_validate({"datasets": [{"path": "x"}]}), 1, {"local": 0})
    with pytest.raises(MachineError) as refused, ray_nodes(cluster, placement, *[lambda *words: None] * 2):
        pass
    assert "127.0.0.9" in str(refused.value) and "refused" in str(refused.value)
    eventually(lambda: not ray_processes(cluster.port), "the head has ended", 60)
