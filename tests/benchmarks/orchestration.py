"""The control plane's cost per rollout: worker, Temporal, Postgres and adapter are real, boxes and engine scripted.

`ratchet admin bench orchestration` evaluates 300 rollouts, `--full` 10,000; `-- --rollouts N --at-once N --turns N`
choose other sizes. Figures are per part of the evaluation, so that a cost that grows with the number of rollouts shows.

`-- --cuts 3` kills worker, Temporal and Postgres with SIGKILL while it runs, at equal distances, starts them again, and
counts afterwards whether every rollout has one verdict; the exit code is 1 if one has none or several.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from temporalio.client import Client

from cli.console import say
from tests.benchmarks._commit import commit
from tests.benchmarks._orchestration_stack import CONTROL_PLANE, OrchestrationStack, orchestration_stack

PARTS = 5
"""The evaluation is measured in so many parts of equal size."""
SAMPLES = 8
CUT = ("worker", "temporal", "postgres")
MAX_SAMPLED_HISTORIES = 50


@dataclass(frozen=True)
class Mark:
    """A moment of the evaluation."""

    num_ended: int
    at: float
    cpu_seconds: dict[str, float]


async def watch(found: OrchestrationStack, client: Client, run_id: str, count: int, cuts: int) -> list[Mark]:
    """Follow the evaluation to its end, and cut it; return a mark at the start, at each part, and at the end."""
    handle = client.get_workflow_handle(f"run/{run_id}")
    ending = asyncio.create_task(handle.result())
    marks = [Mark(0, time.monotonic(), found.cpu_seconds())]
    num_cut = 0
    while not ending.done():
        await asyncio.wait({ending}, timeout=0.5)
        try:
            ended = await found.num_ended()
        except Exception:  # the store was cut, and is starting
            continue
        if ended >= len(marks) * count / PARTS and len(marks) < PARTS:
            marks.append(Mark(ended, time.monotonic(), found.cpu_seconds()))
            say(f"{ended} of {count} rollouts have ended")
        if num_cut < cuts and ended >= (num_cut + 1) * count / (cuts + 1):
            part = CUT[num_cut % len(CUT)]
            say(f"kill -9 of {part} after {ended} rollouts")
            found.end(part, kill=True)
            found.spawn(part)
            num_cut += 1
        if ending.done() and ending.exception() is not None and num_cut:
            ending = asyncio.create_task(handle.result())  # Temporal was away
            await asyncio.sleep(1)
    await ending
    return [*marks, Mark(await found.num_ended(), time.monotonic(), found.cpu_seconds())]


def figures(marks: list[Mark]) -> list[dict[str, Any]]:
    """Return speed and CPU per rollout of each part of the evaluation."""
    rows = []
    for begin, end in pairwise(marks):
        number, seconds = end.num_ended - begin.num_ended, end.at - begin.at
        if number <= 0:
            continue
        used = {name: (end.cpu_seconds[name] - begin.cpu_seconds[name]) / number for name in CONTROL_PLANE}
        row = {"up_to_rollout": end.num_ended, "rollouts_per_second": number / seconds}
        rows.append({**row, "cpu_seconds_per_rollout": {**used, "all": sum(used.values())}})
    return rows


async def histories(client: Client, run_id: str) -> dict[str, float]:
    """Return how many events a rollout has, and the executions and events of the evaluation's own workflow."""
    lengths = []
    query = f'WorkflowId STARTS_WITH "evaluate/{run_id}/" OR WorkflowId STARTS_WITH "rollout/{run_id}/"'
    executions = []
    async for one in client.list_workflows(query):
        if one.workflow_type == "Rollout" and len(lengths) < MAX_SAMPLED_HISTORIES:
            lengths.append(one.history_length)
        if one.workflow_type == "Evaluate":
            executions.append(one.history_length)
    return {
        "rollout_events": sum(lengths) / max(1, len(lengths)),
        "evaluation_executions": len(executions),
        "evaluation_events": sum(executions),
    }


async def measure(count: int, at_once: int, turns: int, cuts: int) -> dict[str, Any]:
    async with orchestration_stack(at_once, turns) as (found, client):
        run_id = found.run_id
        config = found.evaluation(count, SAMPLES)
        count = max(1, count // SAMPLES) * SAMPLES
        say(f"{count} rollouts, {at_once} boxes, {turns} model calls each")
        argument = {"config": config}
        await client.start_workflow("TrainRun", argument, id=f"run/{run_id}", task_queue="control")
        marks = await watch(found, client, run_id, count, cuts)
        verdicts = await found.verdicts()
        events = await histories(client, run_id)
    parts = figures(marks)
    whole = figures([marks[0], marks[-1]])[0]
    return {
        "rollouts": count,
        "boxes": at_once,
        "model_calls_per_rollout": turns,
        "cuts": cuts,
        "seconds": marks[-1].at - marks[0].at,
        "whole": whole,
        "parts": parts,
        "last_part_over_first": parts[-1]["cpu_seconds_per_rollout"]["all"]
        / parts[0]["cpu_seconds_per_rollout"]["all"],
        "histories": events,
        "verdicts": verdicts,
        "every_verdict_once": _every_verdict_once(verdicts, count),
    }


def _every_verdict_once(verdicts: dict[str, Any], count: int) -> bool:
    counted = {row["outcome"]: row["rollouts"] for row in verdicts["rollouts"] if row["counted"]}
    return (
        counted == {"graded": count}
        and not verdicts["patches_with_several_grades"]
        and not verdicts["members_that_count_twice"]
        and verdicts["evaluations_ended"] == 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the control plane per rollout.")
    parser.add_argument("--full", action="store_true", help="10,000 rollouts")
    parser.add_argument("--rollouts", type=int, default=None)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cuts", type=int, default=0)
    options = parser.parse_args()
    count = options.rollouts or (10_000 if options.full else 300)
    machine = {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load": os.getloadavg()[0]}
    found = asyncio.run(measure(count, options.at_once, options.turns, options.cuts))
    print(json.dumps({"commit": commit(), "machine": machine, **found}, indent=2))
    if not found["every_verdict_once"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
