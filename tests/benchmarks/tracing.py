"""Benchmark: what traces cost a turn in the adapter: the same turns with and without a collector, in turn.

`ratchet admin bench tracing --json`; without --full with two pairs of blocks. The CPU time is that of the adapter's
process, the thread that exports included. The collector is a stand-in that answers at once.
"""

import asyncio
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import orjson
import psutil

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parents[2]))

from cli.console import say
from tests.benchmarks._adapter_load import RESULT_CHARS, measure_turns
from tests.benchmarks._commit import commit
from tests.benchmarks._options import asks_for_all_repetitions
from tests.standins.collector import Collector

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_NUM_AGENTS = 8
_NUM_TURNS = 25


async def _block(url: str | None) -> float:
    """Return the adapter's CPU milliseconds per turn; `url` None: without traces."""
    os.environ.pop(_ENDPOINT, None)
    if url is not None:
        os.environ[_ENDPOINT] = url
    return await measure_turns(_NUM_AGENTS, _NUM_TURNS, RESULT_CHARS, say)


async def _measure(num_pairs: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"off": [], "on": []}
    with Collector() as collector:
        for number in range(num_pairs):
            for name in ("off", "on") if number % 2 == 0 else ("on", "off"):
                say(f"pair {number + 1} of {num_pairs}: traces {name}")
                found[name].append(await _block(collector.url if name == "on" else None))
        turns = len(collector.named("turn"))
        spans = len(collector.spans)
    off, on = statistics.median(found["off"]), statistics.median(found["on"])
    ratio = round(on / off, 3)
    return {"cpu_ms_per_turn": found, "on_over_off": ratio, "turns": turns, "spans_per_turn": round(spans / turns, 2)}


def main() -> None:
    full = asks_for_all_repetitions(__doc__)
    load_before = psutil.getloadavg()[0]
    result = {
        "commit": commit(),
        "machine": {"cores": os.cpu_count(), "load_average_at_start": round(load_before, 1)},
        **asyncio.run(_measure(6 if full else 2)),
    }
    sys.stdout.buffer.write(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
