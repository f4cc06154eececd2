"""Boots on several hosts behind a front: boots a second, and how evenly boxes are spread, beside one gateway alone.

The hosts are network namespaces of this machine, each with a real gateway, so they share its cores: the ratio tells
what the front costs, and not how boots grow with machines. `--hosts N` is their number. Needs root and iproute2.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from cli.console import say
from sandbox_gateway.front import host_tag
from sandboxes.base import Sandbox, SandboxProvider
from tests.benchmarks._commit import commit
from tests.network_hosts import network_hosts
from tests.private_gateway import private_front, private_gateway

BOXES, AT_ONCE, ROUNDS = 100, 16, 3


async def boots(provider: SandboxProvider) -> list[Sandbox]:
    """Make BOXES boxes, AT_ONCE at a time, each with a first command."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one() -> Sandbox:
        async with slots:
            key = uuid.uuid4().hex
            box = await provider.create("host", ttl_seconds=3600, metadata={}, idempotency_key=key)
            await box.exec("true")
            return box

    return list(await asyncio.gather(*(one() for _ in range(BOXES))))


async def measure(alone: SandboxProvider, front: SandboxProvider, num_hosts: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"one_gateway": [], "front": []}
    spread: list[list[int]] = []
    for number in range(ROUNDS):
        for name, provider in (("one_gateway", alone), ("front", front)):
            started = time.monotonic()
            boxes = await boots(provider)
            took = time.monotonic() - started
            say(f"round {number + 1}, {name}: {BOXES / took:.1f} boots a second")
            seconds[name].append(took)
            if name == "front":
                counts = Counter(box.id[: len(host_tag("")) + 1] for box in boxes)
                spread.append(sorted([*counts.values(), *[0] * (num_hosts - len(counts))]))
            for box in boxes:
                await box.kill()
    rates = {name: [round(BOXES / one, 1) for one in taken] for name, taken in seconds.items()}
    ratio = round(sum(seconds["one_gateway"]) / sum(seconds["front"]), 2)
    return {"boots_per_second": rates, "front_to_one_gateway": ratio, "boxes_per_host": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts")
    num_hosts = parser.parse_args().hosts
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as name,
        network_hosts(num_hosts) as hosts,
        private_gateway(Path(name) / "alone", max_boxes=BOXES) as alone,
        private_front(Path(name), hosts, max_boxes=BOXES) as front,
    ):
        found = asyncio.run(measure(alone, front, num_hosts))
    result = {"commit": commit(), "hosts": num_hosts, "load_before": round(load, 2), **found}
    sys.stdout.buffer.write(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
