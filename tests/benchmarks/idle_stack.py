"""CPU of a stack that does nothing: each part's share of one core while the quickstart's stack has no run.

The stack has a home and ports of its own, and an untrained tiny model. `--seconds` are measured, after `--settle`
seconds.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import psutil

from cli.console import say
from ratchet.config_sources import load_config
from stack.cpu_meter import CpuMeter
from stack.parts import Stack
from stack.startup import bring_up
from stack.supervisor import Supervisor
from tests.benchmarks._commit import commit
from tests.free_ports import free_ports
from tests.standins.tiny_model import make_tokenizer, make_weights

CONFIG = Path("configs/quickstart.yaml")
SUPERVISORD = "supervisord"
_SAMPLE_SECONDS = 10.0


def measure(stack: Stack, settle_seconds: float, seconds: float) -> dict[str, float]:
    """Return part → CPU seconds of its process tree per second."""
    supervisord = psutil.Process(int((stack.home / "supervisord.pid").read_text()))
    time.sleep(settle_seconds)
    meter, before, began = CpuMeter(stack), supervisord.cpu_times(), time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        time.sleep(min(_SAMPLE_SECONDS, left))
        meter.sample()
    took, after = time.monotonic() - began, supervisord.cpu_times()
    used = {**meter.used, SUPERVISORD: after.user + after.system - before.user - before.system}
    return {name: round(share / took, 4) for name, share in sorted(used.items(), key=lambda one: -one[1])}


def measure_new_stack(settle_seconds: float, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="ratchet-idle-", ignore_cleanup_errors=True) as directory:
        home = Path(directory)
        home.chmod(0o755)  # the embedded Postgres runs as another user
        os.environ["RATCHET_HOME"] = str(home)
        free_ports(home)
        stack = Stack(home)
        try:
            make_tokenizer(home)
            make_weights(home)
            bring_up(stack, load_config(CONFIG, [f"model={home}"]), say)
            say(f"measuring for {seconds:.0f} s")
            return measure(stack, settle_seconds, seconds)
        finally:
            Supervisor(stack).down()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--settle", type=float, default=180.0)
    parser.add_argument("--full", action="store_true", help="as without it")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    shares = measure_new_stack(options.settle, options.seconds)
    facts: dict[str, Any] = {
        "commit": commit(),
        "machine": {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load_before": round(load, 2)},
        "seconds": options.seconds,
        "share_of_one_core": round(sum(shares.values()), 4),
        "parts": shares,
    }
    sys.stdout.buffer.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
