"""The cost of a grade compared with the tests that it runs, and the throughput of two graders.

`--full` takes more tasks and repeats. Both sides run the same commands on the same files with the same interpreter, in
turns. `bare`: in a directory of this machine, as the user of the benchmark, output to a pipe. `grade`: boot a box,
prepare the repository, screen and apply the patch, put the tests in, run them unprivileged under the witness, make the
verdict, end the box. `control`: the same with broken tests, as a control run. `trials`: three gold and three empty
grades, which admission needs without a pool. `pool`: the gold run and the tries that make four broken oracles (the
quickstart's rows bring theirs). Times are wall clock and vary with the machine's load; the ratio varies
less.
"""

import asyncio
import base64
import contextlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from activities.datasets.formats import read_rows
from activities.datasets.package_recipes import PYTHON, read_recipes, write_rows
from cli.console import say
from grading.broken_oracles import BrokenOracle, judge_control
from grading.judge_patch import EmptyRun, GradingLimits, PatchJudge
from grading.oracle import Oracle
from grading.registry import GRADERS
from ratchet import paths
from ratchet.config import DatasetConfig, RunConfig
from sandbox_gateway.python_layer import ensure_python_layer
from sandboxes.base import Sandbox, SandboxProvider
from store.tasks import TaskRow
from tests.benchmarks._commit import commit
from tests.benchmarks._options import asks_for_all_repetitions
from tests.private_gateway import private_gateway

RECIPES, QUICKSTART = Path("datasets/packages"), Path("datasets/quickstart/heldout.jsonl")
SIDE_BY_SIDE = 2
POOL_SIZE = 4
TRIALS = 3
CONFIG = RunConfig.model_validate({"datasets": [{"path": "unused"}]})


@dataclass(frozen=True)
class Size:
    tasks: int
    repeats: int
    throughput: int


def tasks_of(path: Path, count: int) -> list[TaskRow]:
    rows = islice(read_rows(DatasetConfig(path=str(path)), ""), count)
    return [TaskRow(0, row["label"], row["image"], row["workdir"], row["grader"], row["spec"]) for row in rows]


def gold_of(task: TaskRow) -> bytes:
    return str(task.spec.get("gold_patch") or "").encode()


class Bare:
    """One task's repository in a directory of this machine, with the same patch and tests."""

    def __init__(self, task: TaskRow, directory: Path) -> None:
        self.directory = directory
        command = task.spec["swe_bench"]["test_cmd"] if task.grader == "swe_bench" else task.spec["eval_cmd"]
        self.command = self._here(command, task)
        directory.mkdir(parents=True)
        self._unpack(task.spec.get("repository_archive") or "")
        for command in task.spec["pre_commands"]:
            subprocess.run(
                ["bash", "-c", self._here(command, task)], cwd=directory, check=True, stdout=subprocess.DEVNULL
            )
        subprocess.run(["git", "apply", "-"], input=gold_of(task), cwd=directory, check=True)
        self._unpack(task.spec.get("tests_archive") or "")

    def _here(self, command: str, task: TaskRow) -> str:
        layer = ensure_python_layer(paths.cache()) / "bin" / "python3"
        return command.replace(task.workdir, str(self.directory)).replace(PYTHON, str(layer))

    def _unpack(self, archive: str) -> None:
        if archive:
            with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
                tar.extractall(self.directory, filter="data")

    def run(self) -> float:
        started = time.monotonic()
        subprocess.run(
            ["bash", "-c", self.command], cwd=self.directory, capture_output=True, stdin=subprocess.DEVNULL, check=False
        )
        return time.monotonic() - started


def judge_of(task: TaskRow) -> PatchJudge:
    return PatchJudge(GRADERS[task.grader], task, GradingLimits.of_run(CONFIG), controlled=True)


@contextlib.asynccontextmanager
async def fresh_box(provider: SandboxProvider, task: TaskRow) -> AsyncIterator[Sandbox]:
    box = await provider.create(
        task.image, ttl_seconds=900, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
    )
    try:
        yield box
    finally:
        await box.kill()
        await box.close()


async def graded(provider: SandboxProvider, task: TaskRow, patch: bytes | None = None) -> float:
    """Return the seconds of a grade of the gold patch, or of `patch`, which must not solve the task."""
    started = time.monotonic()
    diff = gold_of(task) if patch is None else patch
    async with fresh_box(provider, task) as box:
        verdict = (await judge_of(task).judge(box, diff)).verdict
    assert verdict.solved == bool(diff), (task.label, verdict.reason)
    return time.monotonic() - started


@dataclass(frozen=True)
class Pool:
    """The broken oracles of a task. `seconds`: the gold run and all tries, boxes included."""

    broken: list[BrokenOracle]
    tries: int
    seconds: float


async def make_pool(provider: SandboxProvider, task: TaskRow) -> Pool:
    """Make four broken oracles, as admission does, or return those of the row."""
    if task.spec.get("broken_oracles"):
        return Pool([BrokenOracle.of_json(one) for one in task.spec["broken_oracles"]], 0, 0.0)
    started = time.monotonic()
    judge = judge_of(task)
    async with fresh_box(provider, task) as box:
        done = await judge.run(box, gold_of(task))
    assert done.run is not None
    oracle = Oracle.of_run(done.run.observed, done.run.outcomes)
    empty = EmptyRun(task.spec["swe_bench"]["fail_to_pass"], [])
    broken: list[BrokenOracle] = []
    tries = 0
    while len(broken) < POOL_SIZE and tries < 3 * POOL_SIZE:
        async with fresh_box(provider, task) as box:
            made = await judge.break_tests(box, gold_of(task), oracle, empty, tries)
        tries += 1
        if made.broken is not None and made.broken.is_valid:
            broken.append(made.broken)
    return Pool(broken, tries, time.monotonic() - started)


async def controlled(provider: SandboxProvider, task: TaskRow, pool: Pool, number: int) -> float:
    """Return the seconds of a control run of the gold patch."""
    started = time.monotonic()
    broken = pool.broken[number % len(pool.broken)]
    async with fresh_box(provider, task) as box:
        done = await judge_of(task).run(box, gold_of(task), broken)
    assert done.run is not None and not judge_control(broken, done.run).passed, task.label
    return time.monotonic() - started


async def control_costs(provider: SandboxProvider, tasks: list[TaskRow], size: Size) -> dict[str, Any]:
    """Compare control runs with grades, in turns, and the pool with the trials of admission."""
    found = []
    for task in tasks:
        pool = await make_pool(provider, task)
        assert pool.broken, f"{task.label} has no broken oracle"
        empty = [await graded(provider, task, b"") for _ in range(TRIALS)]
        pairs = [
            (await graded(provider, task), await controlled(provider, task, pool, number))
            for number in range(size.repeats)
        ]
        seconds = [median(side) for side in zip(*pairs, strict=True)]
        figures = {
            "grade_seconds": seconds[0],
            "control_seconds": seconds[1],
            "trials_seconds": TRIALS * seconds[0] + sum(empty),
            "pool_seconds": pool.seconds,
        }
        rounded = {name: round(value, 3) for name, value in figures.items()}
        found.append({"task": task.label, "valid": len(pool.broken), "tries": pool.tries, **rounded})
        say(f"{task.label}: {seconds[0]:.2f} s graded, {seconds[1]:.2f} s control run; {pool.tries} tries")
    grade, control, trials, made = (
        sum(float(one[name]) for one in found)
        for name in ("grade_seconds", "control_seconds", "trials_seconds", "pool_seconds")
    )
    return {
        "tasks": found,
        "control_to_grade": round(control / grade, 3),
        "mean_control_seconds": round(control / len(found), 3),
        "pool_to_trials": round(made / trials, 3),
    }


async def compared(provider: SandboxProvider, tasks: list[TaskRow], size: Size, directory: Path) -> dict[str, Any]:
    found = []
    for number, task in enumerate(tasks):
        bare = Bare(task, directory / str(number) / Path(task.workdir).name)
        await asyncio.to_thread(bare.run)  # the first run compiles modules and fills caches
        pairs = [(await asyncio.to_thread(bare.run), await graded(provider, task)) for _ in range(size.repeats)]
        seconds = [median(side) for side in zip(*pairs, strict=True)]
        found.append({"task": task.label, "bare_seconds": round(seconds[0], 3), "grade_seconds": round(seconds[1], 3)})
        say(f"{task.label}: {seconds[0]:.2f} s bare, {seconds[1]:.2f} s graded")
    bare_total, grade_total = (sum(one[name] for one in found) for name in ("bare_seconds", "grade_seconds"))
    return {
        "tasks": found,
        "ratio": round(grade_total / bare_total, 3),
        "overhead_seconds_per_grade": round((grade_total - bare_total) / len(found), 3),
        "grades_per_minute": round(await throughput(provider, tasks, size.throughput), 1),
    }


async def throughput(provider: SandboxProvider, tasks: list[TaskRow], count: int) -> float:
    """Return grades per minute with two at a time, each task equally often."""
    slots, started = asyncio.Semaphore(SIDE_BY_SIDE), time.monotonic()

    async def one(number: int) -> None:
        async with slots:
            await graded(provider, tasks[number % len(tasks)])

    await asyncio.gather(*(one(number) for number in range(count)))
    return 60 * count / (time.monotonic() - started)


async def measure(size: Size) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as name,
        private_gateway(Path(name) / "gateway", max_boxes=SIDE_BY_SIDE + 1) as provider,
    ):
        labels = [recipe.bugs[0].label for recipe in read_recipes(RECIPES) if recipe.bugs][: size.tasks]
        write_rows(RECIPES, Path(name) / "packages.jsonl", paths.cache(), "host", PYTHON, frozenset(labels))
        load = os.getloadavg()[0]
        sets = {
            "packages": tasks_of(Path(name) / "packages.jsonl", size.tasks),
            "quickstart": tasks_of(QUICKSTART, size.tasks),
        }
        results: dict[str, Any] = {
            kind: await compared(provider, tasks, size, Path(name) / kind) for kind, tasks in sets.items()
        }
        results["control_runs"] = {kind: await control_costs(provider, tasks, size) for kind, tasks in sets.items()}
    facts = {
        "machine": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 2),
        "side_by_side": SIDE_BY_SIDE,
    }
    return {**facts, "repeats": size.repeats, "grades_for_throughput": size.throughput, **results}


def main() -> None:
    full = asks_for_all_repetitions(__doc__)
    size = Size(tasks=14, repeats=5, throughput=84) if full else Size(tasks=4, repeats=3, throughput=24)
    result = asyncio.run(measure(size))
    sys.stdout.buffer.write(
        orjson.dumps({"commit": commit(), **result}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )


if __name__ == "__main__":
    main()
