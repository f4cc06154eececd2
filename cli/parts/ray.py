"""`ratchet part ray`: run the head of a local Ray cluster in this process."""

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil

from stack.parts import Stack

_NODE = {"gcs_server", "raylet"}
LOOK_SECONDS = 2.0


def ray() -> None:
    """Run the Ray head on which the learner's ranks run."""
    from stack.engine_parts import learner_devices
    from stack.ray_nodes import RAY_VARIABLES
    from stack.serving_plan import read_plan

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
    arguments += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
    if devices is not None:
        arguments.append(f"--num-gpus={devices.num_gpus}")
    if os.fork() == 0:
        try:
            _watch(psutil.Process(os.getppid()))
        finally:
            os._exit(0)
    os.execv(program, arguments)


def _watch(head: psutil.Process) -> None:
    """Kill the head when a process of its node has ended, so that the supervisor restarts it.

    If a raylet exits by itself, for example after the machine was suspended for half a minute, Ray treats that as an
    intended exit and continues as a head that no worker can join.
    """
    seen: set[str] = set()
    with contextlib.suppress(psutil.NoSuchProcess):  # the head itself has ended
        while not (gone := seen - (there := _children(head))):
            seen |= there & _NODE
            time.sleep(LOOK_SECONDS)
        print(f"ray: {', '.join(sorted(gone))} has ended; the head restarts", file=sys.stderr, flush=True)
        for process in (*head.children(recursive=True), head):
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _children(head: psutil.Process) -> set[str]:
    names = set()
    for child in head.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(child.name())
    return names
