"""`ratchet ray`: becomes the head of a local Ray cluster."""

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
    """The Ray head that the learner's ranks run on."""
    stack = Stack()
    port = stack.ports["ray"]
    # Ray's own defaults would start a rank per `uv run` environment and kill slow starters on a busy laptop.
    os.environ |= {
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    os.environ |= {"RAY_worker_niceness": "0"}  # at Ray's own 15 a rank waits for every box of the next step
    program = str(Path(sys.executable).parent / "ray")
    arguments = [program, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4"]
    arguments += ["--include-dashboard=false", "--object-store-memory=104857600", f"--temp-dir={_temporary(stack)}"]
    # Fixed ports of Ray's own would make two checkouts meet.
    arguments += [
        f"--ray-client-server-port={stack.ports['ray_client']}",
        f"--dashboard-agent-listen-port={stack.ports['ray_agent']}",
    ]
    arguments += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
    if os.fork() == 0:
        try:
            _watch(psutil.Process(os.getppid()))
        finally:
            os._exit(0)
    os.execv(program, arguments)


def _watch(head: psutil.Process) -> None:
    """Kills the head once a part of its node has gone, so that the supervisor starts it anew. Ray takes a raylet that gives up by itself (as
    after the machine stood still for half a minute) for one that was asked to, and goes on as a head that nobody can join.
    """
    seen: set[str] = set()
    with contextlib.suppress(psutil.NoSuchProcess):  # the head itself has ended
        while not (gone := seen - (there := _children(head))):
            seen |= there & _NODE
            time.sleep(LOOK_SECONDS)
        print(f"ray: {', '.join(sorted(gone))} has ended; the head is started anew", file=sys.stderr, flush=True)
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


def _temporary(stack: Stack) -> str:
    """Ray puts unix sockets there, whose paths must stay below 108 characters."""
    return f"/tmp/ratchet-ray-{os.getuid()}-{stack.ports['ray']}"
