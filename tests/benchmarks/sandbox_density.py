"""The density of boxes: boots at 1, 64 and 256 at once with the first command in each, and the memory of idle ones.

Local boxes in turns with containers of podman and docker, each by a daemon of its own, if it is installed and can run
containers here; else the result says why not. `--idle N` and `--idle-containers N` are the numbers of idle ones.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import orjson

from cli.console import say
from ratchet.errors import RatchetError
from sandboxes.base import Sandbox, SandboxProvider
from sandboxes.docker import DockerProvider
from tests.benchmarks._commit import commit
from tests.benchmarks.sandbox import TTL_SECONDS, machine, used_bytes
from tests.e2e.sandboxes.conftest import dockerd, end_daemon, import_image, start_daemon
from tests.private_gateway import private_gateway

AT_ONCE, ROUNDS = (1, 64, 256), 3
SINGLE_BOOTS = 20
"""Boots one after the other in a round."""
PUBLISHED = {
    "AgentENV": {
        "boot_or_resume": "below 50 ms",
        "pause_or_snapshot": "below 100 ms",
        "isolation": "a virtual machine of Firecracker with a kernel of its own; local boxes and containers share the "
        "machine's kernel and have no snapshots",
    }
}
"""Published figures of other services; they were not measured here."""
_LIMITS = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
"""


@contextlib.contextmanager
def containers(program: str) -> Iterator[str]:
    """Yield the address of a daemon of podman or docker that has the image `host`. Raises RatchetError if none runs."""
    binary = {"podman": "podman", "docker": "dockerd"}[program]
    if shutil.which(binary) is None:
        raise RatchetError(f"{binary} is not installed")
    directory = Path(tempfile.mkdtemp(prefix=f"ratchet-{program}-"))
    (directory / "containers.conf").write_text(_LIMITS)
    url = f"unix://{directory}/docker.sock"
    commands = {
        "podman": [
            ["podman", f"--root={directory}/data", f"--runroot={directory}/run", "system", "service", "-t0", url]
        ],
        "docker": [dockerd(directory), dockerd(directory, "--storage-driver=vfs")],
    }
    process = None
    try:
        for command in commands[program]:
            process = process or start_daemon(directory, command, CONTAINERS_CONF=f"{directory}/containers.conf")
        if process is None:
            said = (directory / "dockerd.log").read_text(errors="replace").strip().splitlines()
            raise RatchetError(f"{binary} does not run here: {said[-1] if said else 'it says nothing'}")
        import_image(directory)
        yield url
    finally:
        if process is not None:
            end_daemon(process)
        for mount in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (where := mount.split()[1]).startswith(str(directory)):
                subprocess.run(["umount", "-l", where], check=False)
        shutil.rmtree(directory, ignore_errors=True)


async def make(provider: SandboxProvider) -> Sandbox:
    return await provider.create(
        "host", ttl_seconds=TTL_SECONDS, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
    )


async def boots(provider: SandboxProvider, at_once: int) -> dict[str, list[float]]:
    """Boot so many boxes at the same moment, each with a first command, and end them; return seconds."""
    seconds: dict[str, list[float]] = {"boot": [], "first_exec": []}
    made: list[Sandbox] = []

    async def one() -> None:
        started = time.monotonic()
        box = await make(provider)
        made.append(box)
        booted = time.monotonic()
        await box.exec("true", timeout=600)
        seconds["boot"].append(booted - started)
        seconds["first_exec"].append(time.monotonic() - booted)

    try:
        if at_once == 1:
            for _ in range(SINGLE_BOOTS):
                await one()
        else:
            await asyncio.gather(*(one() for _ in range(at_once)))
    finally:
        await end_all(made)
    return seconds


async def end_all(boxes: list[Sandbox]) -> None:
    slots = asyncio.Semaphore(8)

    async def end(box: Sandbox) -> None:
        async with slots:
            await box.kill()

    await asyncio.gather(*(end(box) for box in boxes))


async def idle(provider: SandboxProvider, count: int) -> dict[str, Any]:
    """The machine's memory before and after; other programs of the machine are part of it."""
    before, boxes, slots = await settled_bytes(), list[Sandbox](), asyncio.Semaphore(8)

    async def one() -> None:
        async with slots:
            boxes.append(await make(provider))

    started = time.monotonic()
    try:
        await asyncio.gather(*(one() for _ in range(count)))
        took, used = time.monotonic() - started, used_bytes() - before
    finally:
        await end_all(boxes)
    return {"count": count, "seconds": round(took, 1), "mebibytes_each": round(used / count / (1 << 20), 2)}


async def settled_bytes() -> int:
    """The machine's used memory once boxes that ended give none back any more."""
    used = used_bytes()
    while True:
        await asyncio.sleep(5)
        before, used = used, used_bytes()
        if used > before - (4 << 20):
            return used


async def measure(providers: dict[str, SandboxProvider], num_idle: dict[str, int]) -> dict[str, Any]:
    seconds: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in providers}
    failed: dict[str, str] = {}
    for number in range(ROUNDS):
        for at_once in AT_ONCE:
            for name in [one for one in providers if one not in failed]:
                say(f"round {number + 1}: {at_once} of {name} at once")
                try:
                    found = await boots(providers[name], at_once)
                except RatchetError as error:
                    failed[name] = f"{at_once} at once: {error}"
                    continue
                of_all = seconds[name].setdefault(str(at_once), {"boot": [], "first_exec": []})
                for kind, times in found.items():
                    of_all[kind] += times
    result: dict[str, Any] = {
        name: {at_once: {kind: shares(times) for kind, times in both.items()} for at_once, both in of_all.items()}
        for name, of_all in seconds.items()
    }
    for name in [one for one in providers if one not in failed]:
        say(f"{num_idle[name]} idle ones of {name}")
        result[name]["idle"] = await idle(providers[name], num_idle[name])
    return {**result, "failed": failed}


def shares(seconds: list[float]) -> dict[str, Any]:
    p95 = quantiles(seconds, n=20)[-1]
    return {"p50_ms": round(1000 * median(seconds), 1), "p95_ms": round(1000 * p95, 1), "count": len(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1000, help="number of idle local boxes")
    parser.add_argument("--idle-containers", type=int, default=100, help="number of idle containers of each program")
    arguments = parser.parse_args()
    load, missing = os.getloadavg()[0], dict[str, str]()
    with contextlib.ExitStack() as ended:
        directory = Path(ended.enter_context(tempfile.TemporaryDirectory()))
        local = private_gateway(directory / "gateway", max_boxes=max(arguments.idle, *AT_ONCE) + 1)
        providers: dict[str, SandboxProvider] = {"local": ended.enter_context(local)}
        for program in ("podman", "docker"):
            try:
                providers[program] = DockerProvider(ended.enter_context(containers(program)))
            except (RatchetError, AssertionError) as error:
                missing[program] = str(error)
        num_idle = {name: arguments.idle if name == "local" else arguments.idle_containers for name in providers}

        async def measured() -> dict[str, Any]:
            try:
                return await measure(providers, num_idle)
            finally:
                for provider in providers.values():
                    await provider.close()

        found = asyncio.run(measured())
    result = {"commit": commit(), "machine": machine(), "load_before": round(load, 2), "missing": missing, **found}
    result["published"] = PUBLISHED
    sys.stdout.buffer.write(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
