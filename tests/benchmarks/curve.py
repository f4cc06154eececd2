"""The quickstart's curve: three warm-start seeds, and a control whose advantages are permuted within their groups.

Why here: a figure is worth what its control is worth; all four runs come from one config and one commit.
Called by: `ratchet bench curve` (the seeds and the control one after the other; a finished run with the same config is reused).

Without --full only seed 0 and its control are run. Prints JSON; the picture goes to docs/curve.png.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from ratchet.cli.console import say
from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from ratchet.curve import draw
from ratchet.local.bring_up import bring_up
from ratchet.local.runs import collect, start_run, watch
from ratchet.local.stack import Stack
from ratchet.store import runs
from ratchet.store.database import Database

CONFIG = Path("configs/quickstart.yaml")
PICTURE = Path("docs/curve.png")


def variants(full: bool) -> dict[str, list[str]]:
    """Further temperatures before training are evaluated once, at seed 0."""
    less = ["evaluation.start_temperatures=[]"]
    found = {"seed 0": ["seed=0"], "control (shuffled)": ["seed=0", "training.advantage=shuffled", *less]}
    return found | ({"seed 1": ["seed=1", *less], "seed 2": ["seed=2", *less]} if full else {})


def finished(stack: Stack, config: RunConfig) -> str | None:
    async def find() -> str | None:
        database = Database(stack.environment()["RATCHET_DATABASE_URL"], pool_size=1)
        try:
            async with database.begin() as connection:
                return await runs.newest_done(connection, config.digest())
        finally:
            await database.close()

    return asyncio.run(find())


def run_variant(stack: Stack, name: str, overrides: list[str]) -> dict[str, Any]:
    config = load_config(CONFIG, overrides)
    bring_up(stack, config, say)
    run_id = finished(stack, config)
    if run_id is None:
        run_id = asyncio.run(start_run(stack, config, "curve", new=False, say=say))
        say(f"{name}: run {run_id}")
        asyncio.run(watch(stack, run_id, say))
    return asyncio.run(collect(stack, run_id))


def main() -> None:
    stack = Stack()
    results = {name: run_variant(stack, name, overrides) for name, overrides in variants("--full" in sys.argv).items()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    curves = {
        name: [(step["step"], step["metrics"]["reward_mean"]) for step in result["steps"] if step["metrics"]]
        for name, result in results.items()
    }
    reports = {name: result["summary"] for name, result in results.items()}
    PICTURE.parent.mkdir(exist_ok=True)
    draw(curves, reports, f"quickstart at commit {commit}", PICTURE)
    shown = {name: {"run_id": result["run_id"], "state": result["state"], **result["summary"]} for name, result in results.items()}
    sys.stdout.buffer.write(orjson.dumps({"commit": commit, "runs": shown}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
