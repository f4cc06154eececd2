"""`ratchet launch` over two hosts, the cable cut in mid-run: the engine on the other host, or all boxes and a worker.

The hosts are network namespaces, each with its own address; the second one has a real sshd. Skipped without root,
iproute2 or openssh-server.
"""

import asyncio
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stack.parts import Stack
from stack.postgres import database_url as own_database_url
from stack.postgres import embedded_server
from tests.e2e.conftest import ROOT
from tests.e2e.launch_process import launching, processes_with, require_nothing_lost
from tests.network_hosts import NetworkHost, network_hosts, ssh_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, GROUP_SIZE, CUT_SECONDS = 4, 4, 60.0
SMALL = {
    "LIMITS": "{agent_seconds: 120, eval_seconds: 60, workspace_seconds: 60}",
    "ENGINE": "{dtype: float32, max_num_seqs: 64, reasoning_parser: null, stop_token_ids: [], args: [--enforce-eager]}",
    "HARNESS": "{name: bash_agent, prompt: '{problem_statement}', max_turns: 4, step_timeout_seconds: 20}",
    "SAMPLING": "{max_response_tokens: 56, max_context_tokens: 512, min_response_tokens: 8}",
    "SANDBOX": "{max_boxes: 16}",
    "TRAINING": "{steps: 4, groups_per_step: 3, group_size: 4, max_groups_seen: 1000, bin_tokens: 4096, "
    "checkpoint_every: 1, activation_checkpointing: false, learning_rate: 2.5e-4}",
}
"""The tiny policy's values in place of the launcher's."""


@pytest.fixture
def hosts() -> Iterator[tuple[NetworkHost, NetworkHost]]:
    with network_hosts(2) as (head, worker):
        yield head, worker


@pytest.fixture
def bystander(hosts: tuple[NetworkHost, NetworkHost]) -> "Iterator[subprocess.Popen[bytes]]":
    """A process of the other host that no launch may touch."""
    process = subprocess.Popen(hosts[1].inside("sleep", "100000"), start_new_session=True)
    yield process
    process.kill()
    process.wait()


def config_of(path: Path, **values: object) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    config["training"] |= {"steps": STEPS, "group_size": GROUP_SIZE, "checkpoint_every": 1}
    return config | values


def test_the_variables_of_the_brief_are_enough(
    hosts: tuple[NetworkHost, NetworkHost],
    bystander: "subprocess.Popen[bytes]",
    home: Path,
    tiny_policy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of hosts, which has the head, too; Postgres and Temporal are those of the stack."""
    head, worker = hosts
    (home / "hosts").write_text(f"{head.address}\n{worker.address}\n")
    tasks = ROOT / "datasets" / "quickstart" / "train.jsonl"
    variables = {"HF_CHECKPOINT": str(tiny_policy), "PROMPT_DATA": str(tasks), "HOSTFILE": str(home / "hosts")}
    variables |= {f"RATCHET_{section}": values for section, values in SMALL.items()}
    with ssh_server([worker.address], 22, [worker.inside()]) as ssh:
        (home / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh {shlex.join(ssh)} "$@"\n')  # the keys of this server
        (home / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
        with launching(home / "engine", head, None, None, variables) as launch:
            launch.until(lambda: "step 1:" in launch.said())
            worker.cut()
            time.sleep(CUT_SECONDS)  # the length of the cut
            worker.mend()
            launch.wait_done()
            said, dumped = (launch.directory / "run.log").read_text(), launch.dumped()
    state = home / "engine" / "state"
    assert processes_with(str(home / "engine"), f"{head.address}:6379") == [], (
        "all that the launch has started has ended"
    )
    assert bystander.poll() is None
    assert f"the Ray node of {worker.address} has ended" in said and "engine answers again" in said
    for text in (
        f"node {worker.address} (0 GPUs)",
        "[postgres] ",
        "[worker] ",
        f"[ray {worker.address}] ",
        "'summary':",
    ):
        assert text in said
    port = Stack(state).ports["postgres"]
    with embedded_server(state / "postgres", port):
        asyncio.run(require_nothing_lost(own_database_url(port), dumped, STEPS, GROUP_SIZE))


def test_boxes_and_a_worker_on_the_other_host(
    hosts: tuple[NetworkHost, NetworkHost], bystander: "subprocess.Popen[bytes]", home: Path, config_path: Path
) -> None:
    """Postgres and Temporal are those of the stack, on loopback; ssh joins the ports."""
    head, worker = hosts
    with ssh_server([worker.address], 22, [worker.inside()]) as ssh:
        idle = worker.commands()
        cluster = {"head": head.address, "hosts": {worker.address: {"boxes": True}}, "ssh": list(ssh), "user": "root"}
        with launching(home / "boxes", head, cluster, config_of(config_path), {}) as launch:
            launch.until(lambda: "step 1:" in launch.said())
            there = worker.commands()
            queues = "--queue=boot --queue=agent --queue=grade"
            for part in (f"ratchet part gateway --name={worker.address}", f"ratchet part worker {queues}"):
                assert any(part in line for line in there), there
            assert not any(line.endswith(f" part gateway --name={worker.address}") for line in head.commands())
            worker.cut()
            time.sleep(CUT_SECONDS)  # the length of the cut
            worker.mend()
            launch.wait_done()
            dumped = launch.dumped()
            log = (launch.directory / "run.log").read_text().splitlines()
            assert any(f"[worker {worker.address}] " in line and "worker ready" in line for line in log)
        assert sorted(worker.commands()) == sorted(idle), "everything that the launch has started has ended"
    assert processes_with(str(home / "boxes")) == []
    assert bystander.poll() is None
    state = home / "boxes" / "state"
    port = Stack(state).ports["postgres"]
    with embedded_server(state / "postgres", port):
        asyncio.run(require_nothing_lost(own_database_url(port), dumped, STEPS, GROUP_SIZE))
