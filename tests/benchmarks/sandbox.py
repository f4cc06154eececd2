"""The cost of a local box: creation, commands, bytes, many boxes at once, idle boxes.

`--full` takes more repeats. Each figure is compared with the same work without a box, in turns: a command under plain
`bwrap` for a create with its first command, a login shell for a command, a copied file for a transfer. Times vary with
the machine's load; the ratio varies less.

With RATCHET_SANDBOX_PROVIDER=docker it only times creates, of containers of the image `host` at DOCKER_HOST, with local
boxes in turns.
"""

import asyncio
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import orjson

from cli.console import say
from sandboxes import docker_settings
from sandboxes.base import Sandbox, SandboxProvider
from sandboxes.registry import sandbox_provider
from tests.benchmarks._commit import commit
from tests.benchmarks._options import asks_for_all_repetitions
from tests.private_gateway import private_gateway

BUBBLEWRAP = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--die-with-parent"]
# Without the profile of the user who runs the benchmark.
LOGIN_SHELL = ["env", "-i", "HOME=/nonexistent", "PATH=/usr/bin:/bin", "bash", "-l", "-c", "true"]
CREATES_AT_ONCE = 50
TTL_SECONDS = 3600


@dataclass(frozen=True)
class Size:
    creates: int
    commands: int
    transfers: int
    idle: int


async def make(provider: SandboxProvider) -> Sandbox:
    return await provider.create("host", ttl_seconds=TTL_SECONDS, metadata={}, idempotency_key=uuid.uuid4().hex)


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    started = time.monotonic()
    await work()
    return time.monotonic() - started


async def run_bare(command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert await process.wait() == 0, command


async def in_turns(
    count: int, ours: Callable[[], Awaitable[Any]], bare: Callable[[], Awaitable[Any]]
) -> dict[str, Any]:
    pairs = [(await timed(ours), await timed(bare)) for _ in range(count)]
    box_seconds, bare_seconds = (list(side) for side in zip(*pairs, strict=True))
    return {
        "box_ms": round(1000 * median(box_seconds), 1),
        "box_p90_ms": round(1000 * quantiles(box_seconds, n=10)[-1], 1),
        "bare_ms": round(1000 * median(bare_seconds), 1),
        "ratio": round(median(box_seconds) / median(bare_seconds), 2),
        "count": count,
    }


async def creates(provider: SandboxProvider, count: int) -> dict[str, Any]:
    """Time creates; the kill that follows is not timed."""
    made: list[Sandbox] = []

    async def create() -> None:
        made.append(await make(provider))

    found = await in_turns(count, create, lambda: run_bare([*BUBBLEWRAP, *LOGIN_SHELL]))
    kill_seconds = [await timed(box.kill) for box in made]
    return {**found, "kill_ms": round(1000 * median(kill_seconds), 1)}


async def transfers(box: Sandbox, directory: Path, megabytes: int, count: int) -> dict[str, Any]:
    local, copy = directory / "local.bin", directory / "copy.bin"
    local.write_bytes(os.urandom(1_000_000) * megabytes)

    def copied() -> Awaitable[Any]:
        return asyncio.to_thread(shutil.copyfile, local, copy)

    up = await in_turns(count, lambda: box.write_file("/workspace/file.bin", local), copied)
    down = await in_turns(count, lambda: box.read_file("/workspace/file.bin"), copied)
    for facts in (up, down):
        facts["box_megabytes_per_second"] = round(1000 * megabytes / facts["box_ms"], 1)
    return {"up": up, "down": down}


async def many(provider: SandboxProvider) -> dict[str, Any]:
    """Compare creates requested at the same moment with as many in sequence."""
    boxes: list[Sandbox] = []

    async def at_once() -> None:
        boxes.extend(await asyncio.gather(*(make(provider) for _ in range(CREATES_AT_ONCE))))

    together = await timed(at_once)
    await asyncio.gather(*(box.kill() for box in boxes))
    alone = 0.0
    for _ in range(CREATES_AT_ONCE):
        alone += await timed(lambda: _append(boxes, provider))
        await boxes[-1].kill()
    return {
        "count": CREATES_AT_ONCE,
        "seconds": round(together, 2),
        "one_by_one_seconds": round(alone, 2),
        "ratio": round(together / alone, 2),
    }


async def _append(boxes: list[Sandbox], provider: SandboxProvider) -> None:
    boxes.append(await make(provider))


def used_bytes() -> int:
    """Return the machine's memory that is not available to other programs."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * (int(facts["MemTotal"].split()[0]) - int(facts["MemAvailable"].split()[0]))


async def idle(provider: SandboxProvider, count: int) -> dict[str, Any]:
    """Compare the machine's memory before and after; other programs of the machine are part of the figure."""
    before, boxes = used_bytes(), list[Sandbox]()
    slots = asyncio.Semaphore(8)

    async def one() -> None:
        async with slots:
            boxes.append(await make(provider))
            if len(boxes) % 200 == 0:
                say(f"{len(boxes)} idle boxes")

    seconds = await timed(lambda: asyncio.gather(*(one() for _ in range(count))))
    used = used_bytes() - before
    alive = await in_turns(30, lambda: boxes[0].exec("true"), lambda: run_bare(LOGIN_SHELL))
    ending = await timed(lambda: asyncio.gather(*(_kill(box, slots) for box in boxes)))
    facts = {
        "count": count,
        "create_seconds": round(seconds, 1),
        "kill_seconds": round(ending, 1),
        "exec_beside_them": alive,
    }
    return {**facts, "mebibytes_per_box": round(used / count / (1 << 20), 2)}


async def _kill(box: Sandbox, slots: asyncio.Semaphore) -> None:
    async with slots:
        await box.kill()


async def measure(size: Size) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as name,
        private_gateway(Path(name) / "gateway", max_boxes=size.idle + CREATES_AT_ONCE) as provider,
    ):
        async with await make(provider) as box:
            say("create")
            found: dict[str, Any] = {"create": await creates(provider, size.creates)}
            say("exec")
            found["exec"] = await in_turns(size.commands, lambda: box.exec("true"), lambda: run_bare(LOGIN_SHELL))
            for megabytes in (5, 100):
                say(f"{megabytes} MB up and down")
                found[f"transfer_{megabytes}_mb"] = await transfers(box, Path(name), megabytes, size.transfers)
        say(f"{CREATES_AT_ONCE} creates at once")
        found["concurrent_creates"] = await many(provider)
        found["idle"] = await idle(provider, size.idle)
    return {"machine": machine(), "load_before": round(load, 2), **found}


async def measure_containers(count: int) -> dict[str, Any]:
    """Time creates of containers without a network, such as grade a patch, in turns with local boxes."""
    load = os.getloadavg()[0]
    made: list[Sandbox] = []

    async def create(provider: SandboxProvider) -> None:
        identity = {"metadata": {"purpose": "benchmark"}, "idempotency_key": uuid.uuid4().hex}
        made.append(await provider.create("host", ttl_seconds=TTL_SECONDS, network=False, **identity))

    with (
        tempfile.TemporaryDirectory() as name,
        private_gateway(Path(name) / "gateway", max_boxes=count) as local,
    ):
        containers = sandbox_provider()
        try:
            seconds = [
                (await timed(lambda: create(containers)), await timed(lambda: create(local))) for _ in range(count)
            ]
        finally:
            for box in made:
                await box.kill()
            await containers.close()
    shares = {}
    for kind, of_kind in zip(("container", "local_box"), zip(*seconds, strict=True), strict=True):
        shares[f"{kind}_ms"] = round(1000 * median(of_kind), 1)
        shares[f"{kind}_p95_ms"] = round(1000 * quantiles(of_kind, n=20)[-1], 1)
    return {"machine": machine(), "load_before": round(load, 2), "create": {**shares, "count": count}}


def machine() -> dict[str, Any]:
    """Describe the machine of the measurement."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    models = [value.strip() for name, value in facts.items() if name.strip() == "model name"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 30)),
        "kernel": platform.release(),
    }


def main() -> None:
    full = asks_for_all_repetitions(__doc__)
    size = (
        Size(creates=100, commands=500, transfers=20, idle=1000)
        if full
        else Size(creates=30, commands=100, transfers=5, idle=1000)
    )
    is_docker = docker_settings.is_chosen()
    result = asyncio.run(measure_containers(size.creates) if is_docker else measure(size))
    sys.stdout.buffer.write(
        orjson.dumps({"commit": commit(), **result}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )


if __name__ == "__main__":
    main()
