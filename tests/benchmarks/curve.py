"""A laptop run's curve: three warm-start seeds, and a control whose advantages are permuted within their groups.

`ratchet admin bench curve` makes one run after the other and reuses finished ones with the same config. One control can
drift by chance as far as one run can, so --full makes a control for each seed. Both kinds are also pooled by task;
runs that were evaluated on different rows are not pooled.

Prints JSON; the plot is written to docs/curve.png. `python -m tests.benchmarks.curve --config configs/curriculum.yaml
--seeds 0 103` does the same for another config, and writes docs/curve_curriculum.png.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from cli.console import say
from client import Client
from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from ratchet.errors import ConfigError
from ratchet.stored_config import known_digests
from ratchet.types import RunState
from reads.run_result import evaluation_rewards
from stack.curve import draw, summary
from stack.follow_run import collect_result, start_run, watch_run
from stack.parts import Stack
from stack.startup import bring_up
from store.schema import RunTable
from tests.benchmarks._commit import commit

QUICKSTART = Path("configs/quickstart_long.yaml")
_CONTROL = "control, "


def picture(config: Path) -> Path:
    return Path("docs") / ("curve.png" if config == QUICKSTART else f"curve_{config.stem}.png")


def variants(seeds: Sequence[int], full: bool) -> dict[str, list[str]]:
    """Return the overrides of each run, in order. Further temperatures are evaluated once, at the first seed."""
    less = ["evaluation.start_temperatures=[]"]
    trained = {f"seed {seed}": [f"seed={seed}", *(less if seed != seeds[0] else [])] for seed in seeds}
    controls = {
        control_of(f"seed {seed}"): [f"seed={seed}", "training.advantage=shuffled", *less]
        for seed in (seeds if full else seeds[:1])
    }
    return trained | controls


def control_of(name: str) -> str:
    return f"{_CONTROL}{name}"


async def newest_done_run(connection: AsyncConnection, config: RunConfig) -> str | None:
    is_same = RunTable.config_digest.in_(known_digests(config))
    statement = select(RunTable.run_id).where(is_same, RunTable.state == RunState.DONE)
    return (await connection.execute(statement.order_by(RunTable.created_at.desc()).limit(1))).scalar_one_or_none()


def run_variant(stack: Stack, path: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    """Return the finished run: the result of `collect_result`; `rewards`, one row per evaluated rollout; `cost` of
    what was watched, None for a reused run.
    """
    config = load_config(path, overrides)
    bring_up(stack, config, say)
    run_id = Client().read(lambda connection: newest_done_run(connection, config))
    cost = None
    if run_id is None:
        run_id = asyncio.run(start_run(stack, config, "curve", new=False, say=say))
        say(f"{name}: run {run_id}")
        cost = asdict(asyncio.run(watch_run(stack, run_id, say)))
    rewards = Client().read(lambda connection: evaluation_rewards(connection, run_id))
    return asyncio.run(collect_result(stack, run_id)) | {"rewards": rewards, "cost": cost}


def pooled(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Pool the differences of several runs: a task's rate is the mean over all their rollouts of it. Intervals are
    over tasks.

    Raises ConfigError if the runs were evaluated on different rows.
    """
    tasks = {frozenset(row["task"] for row in result["rewards"]) for result in results}
    if len(tasks) > 1:
        raise ConfigError(
            "the runs were evaluated on different rows of the datasets; "
            "move the state directory away and repeat all runs"
        )
    return summary([row for result in results for row in result["rewards"]])["differences"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the control is made for the first")
    parser.add_argument("--full", action="store_true", help="a control for each seed; this takes hours")
    options = parser.parse_args()
    config: Path = options.config
    stack = Stack()
    results = {
        name: run_variant(stack, config, name, overrides)
        for name, overrides in variants(options.seeds, options.full).items()
    }
    made_by = commit()
    seeds = [name for name in results if not name.startswith(_CONTROL)]
    controls = {control_of(name): name for name in seeds if control_of(name) in results}
    curves = {
        name: [
            (step["step"], step["metrics"]["reward_mean"])
            for step in result["steps"]
            if "reward_mean" in (step["metrics"] or {})
        ]
        for name, result in results.items()
    }
    picture(config).parent.mkdir(exist_ok=True)
    draw(
        curves,
        {name: result["summary"] for name, result in results.items()},
        f"{config.stem} at commit {made_by}",
        picture(config),
        controls,
    )
    found = {
        "commit": made_by,
        "runs": {
            name: {key: result[key] for key in ("run_id", "state", "cost")} | result["summary"]
            for name, result in results.items()
        },
        "pooled": {
            "seeds": pooled([results[name] for name in seeds]),
            "controls": pooled([results[name] for name in controls]),
        },
    }
    sys.stdout.buffer.write(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
