"""`ratchet part ray`: run the head of a local Ray cluster while a run wants a learner."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import psutil

from stack.parts import Stack
from stack.ports import free_port
from stack.serving_plan import read_plan
from training.ray_demand import is_ray_wanted

_NODE = {"gcs_server", "raylet"}
_AGENT_PORTS = ("dashboard-agent-grpc", "metrics-export", "runtime-env-agent")
"""Ports that Ray's agents would choose themselves. A raylet ends if one of them takes more than 15 seconds, on a busy
machine each time anew (ray-project/ray#65983)."""
LOOK_SECONDS = 2.0
_UNWANTED_LOOKS = 15
"""Looks in a row after which Ray ends: after a suspension the learner service needs time for its note."""


def ray() -> None:
    """Run the Ray head on which the learner's ranks run, while a run wants a learner."""
    from stack.engine_parts import learner_devices
    from stack.ray_nodes import RAY_VARIABLES

    stack = Stack()
    port = stack.ports["ray"]
    os.environ |= RAY_VARIABLES
    devices = learner_devices(read_plan(stack)) if stack.plan_path.is_file() else None
    if devices is not None:
        os.environ |= devices.environment
    program = str(Path(sys.executable).parent / "ray")
    arguments = [program, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4"]
    arguments += ["--include-dashboard=false", "--object-store-memory=104857600", f"--temp-dir={stack.ray_directory}"]
    # With Ray's fixed default ports two checkouts would connect to each other's cluster.
    arguments += [
        f"--ray-client-server-port={stack.ports['ray_client']}",
        f"--dashboard-agent-listen-port={stack.ports['ray_agent']}",
    ]
    arguments += [f"--{name}-port={free_port()}" for name in _AGENT_PORTS]
    arguments += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
    if devices is not None:
        arguments.append(f"--num-gpus={devices.num_gpus}")
    _run_on_demand(arguments, stack)


def _run_on_demand(arguments: list[str], stack: Stack) -> NoReturn:
    from engine.process import die_with_parent

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the head ends with this process
    while True:
        while not is_ray_wanted(stack.home):
            time.sleep(LOOK_SECONDS)
        head = psutil.Popen(arguments, preexec_fn=die_with_parent)
        try:
            gone = _watch(head, stack)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (*head.children(recursive=True), head):
                    process.kill()
            head.wait()
        if gone:
            print(f"ray: {', '.join(sorted(gone))} has ended; the head restarts", file=sys.stderr, flush=True)
            sys.exit(1)


def _watch(head: psutil.Popen, stack: Stack) -> set[str]:
    """Return which processes of the node have ended by themselves, none if Ray is not wanted any more.

    If a raylet exits by itself, for example after the machine was suspended for half a minute, Ray treats that as an
    intended exit and continues as a head that no worker can join.
    """
    seen: set[str] = set()
    num_unwanted = 0
    while num_unwanted < _UNWANTED_LOOKS:
        num_unwanted = 0 if is_ray_wanted(stack.home) else num_unwanted + 1
        there = _children(head)
        if gone := seen - there.keys():
            return gone
        if head.poll() is not None:
            return {"ray"}
        if "raylet" in there.keys() - seen:
            _tell_port(there["raylet"], stack.ports["ray_agent"])
        seen |= there.keys() & _NODE
        time.sleep(LOOK_SECONDS)
    return set()


def _children(head: psutil.Popen) -> dict[str, psutil.Process]:
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in head.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[child.name()] = child
    return found


def _tell_port(raylet: psutil.Process, port: int) -> None:
    """Write the file with the agent's port, for which the raylet waits as long although its head is given the port."""
    with contextlib.suppress(psutil.Error, KeyError, OSError):
        options = dict(one.split("=", 1) for one in raylet.cmdline() if "=" in one)
        path = Path(options["--session_dir"], f"dashboard_agent_listen_port_{options['--node_id']}")
        if not path.exists():
            whole = path.with_name(f"{path.name}.ratchet")  # the raylet reads the file as soon as it is there
            whole.write_text(str(port))
            whole.replace(path)
