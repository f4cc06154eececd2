"""Benchmark: what a turn costs in the adapter: prompts by three methods, a thousand sessions at once, what the store
takes.

`ratchet bench adapter --json`; without --full with one repeat of the prompt methods and 30 s of random arrivals.
"""

import os
import sys
from pathlib import Path

import orjson
import psutil

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parents[2]))

from cli.console import say
from tests.benchmarks import _adapter_load, _prompt_cost
from tests.benchmarks._commit import commit


def main() -> None:
    full = "--full" in sys.argv
    load_before = psutil.getloadavg()[0]
    result = {
        "commit": commit(),
        "machine": {"cores": os.cpu_count(), "load_average_at_start": round(load_before, 1)},
        "prompt_cost": _prompt_cost.measure(7 if full else 1, say),
        **_adapter_load.measure(1000, 120 if full else 30, say),
    }
    sys.stdout.buffer.write(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
