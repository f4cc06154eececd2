import os
from pathlib import Path

import pytest

from ratchet.errors import ConfigError, MachineError, SandboxBusyError
from ratchet.temporal_settings import load_temporal_settings
from ratchet.vime_names import VIME_VARIABLES
from stack import host_process
from stack.box_hosts import box_hosts, carried_variables
from stack.cluster import Cluster
from stack.parts import Stack
from stack.ports import free_port
from stack.probes import Probes
from stack.watcher import Watcher
from tests.free_ports import free_ports


def test_other_boxes_of_the_environment_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_of_the_cloud")
    cluster = Cluster.model_validate({"head": "10.0.0.1", "hosts": {"10.0.0.2": {"boxes": True}}})
    with (
        pytest.raises(ConfigError, match=r"host 10.0.0.2 has `boxes: true`, but E2B_API_KEY"),
        box_hosts(cluster, Stack(tmp_path), print, print),
    ):
        pass


def test_a_launch_without_a_host_of_boxes_that_is_up_fails_with_all_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_process, "_START_SECONDS", 0.5)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL"):
        os.environ.pop(name, None)
    free_ports(tmp_path)
    ways = ("-o", "ProxyCommand=echo no way to %h >&2; false")
    hosts = {"10.0.0.2": {"boxes": True}, "10.0.0.3": {"boxes": True}}
    cluster = Cluster.model_validate({"head": "10.0.0.1", "hosts": hosts, "ssh": ways, "directory": tmp_path})
    said: list[str] = []
    with (
        pytest.raises(MachineError, match=r"no host of boxes is up: 10\.0\.0\.2, 10\.0\.0\.3"),
        box_hosts(cluster, Stack(tmp_path), said.append, lambda name, line: None),
    ):
        pass
    for host in hosts:
        assert any(f"the gateway {host} was not up" in line and "no box is made there" in line for line in said)


def test_each_variable_of_a_part_goes_along_under_all_its_names() -> None:
    """Otherwise boxes there would have other images and another agent than the run's."""
    stems = [one.name.removeprefix("VIME_AGENT_") for one in VIME_VARIABLES if one.name.startswith("VIME_AGENT_")]
    names = {f"{prefix}{stem}" for prefix in ("VIME_AGENT_", "SWE_", "SLIME_AGENT_") for stem in stems}
    names |= {
        "ADAPTER_PORT",
        "SWE_BOOT_CONCURRENCY",
        "TEMPORAL_NAMESPACE",
        "RATCHET_HOME",
        "OTEL_SERVICE_NAME",
        "XDG_CACHE_HOME",
    }
    assert set(carried_variables(dict.fromkeys(names, "x") | {"AWS_SECRET_ACCESS_KEY": "y"})) == names


async def test_the_gateway_on_another_host_is_probed_at_its_port_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_ports(tmp_path)
    stack = Stack(tmp_path)
    assert not stack.has_box_host
    closed = f"http://127.0.0.1:{free_port()}"
    variables = {"E2B_API_KEY": stack.box_host_key(), "E2B_API_URL": closed, "E2B_SANDBOX_URL": closed}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert stack.has_box_host and not stack.has_gateway
    assert "gateway" in Watcher(stack).external
    with pytest.raises(SandboxBusyError):
        await Probes(stack, load_temporal_settings(), lambda name: None).gateway()
