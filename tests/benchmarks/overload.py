"""The control plane beside other people's work: busy processes, a program that writes to the disk, a slow Postgres.

Postgres, Temporal, adapter, worker, gateway, boxes, agents and grades are real, the engine is scripted. One evaluation
goes on through all phases; each phase lasts `--seconds`, and the machine is left alone between two of them.

    ratchet admin bench overload -- --boxes 24 --seconds 180 --phases "busy 2,busy 8 600,disk,postgres,restart 2"

The second number of `busy 8 600` is this phase's length in seconds.

Rollouts a minute are compared with those of the quiet phase times the share of the CPU that the other programs left
(`of_share`; 1.0: nothing is lost beyond what was taken away). `recovered_seconds`: from the end of the disturbance
until as many rollouts end in 20 s as in 0.8 of 20 quiet seconds; None: not before the next phase. `task_delays`: from
scheduling to start of workflow tasks. `tried_again`: activities that were begun again because a time-out of Temporal
ended a try. The exit code is 1 if a verdict was lost.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psutil
from sqlalchemy import func, select
from temporalio.api.enums.v1 import EventType, TimeoutType
from temporalio.client import Client

from cli.console import say
from store.schema import RolloutTable
from tests.benchmarks._commit import commit
from tests.benchmarks._orchestration_stack import CONTROL_PLANE, OrchestrationStack, orchestration_stack
from tests.standins.slow_proxy import SlowProxy

SAMPLES = 8
BUSY = [sys.executable, "-c", "while True: pass"]
DISK = ["sh", "-c", 'while :; do dd if=/dev/zero of="$0" bs=1M count=512 conv=fsync 2>/dev/null; done']
SLOW_QUERY_SECONDS = 0.05
SETTLE_SECONDS = 15.0
REST_SECONDS = 75.0
LOOK_SECONDS = 20.0


@dataclass
class Phase:
    """One phase as measured. `cpu_left`: share of the machine's CPU that the other programs left."""

    name: str
    ended: int = 0
    seconds: float = 0.0
    per_minute: float = 0.0
    cpu_left: float = 1.0
    of_share: float | None = None
    recovered_seconds: float | None = None
    open_rollouts: int = 0
    cpu_seconds_per_rollout: dict[str, float] = field(default_factory=dict)
    log_bytes: int = 0
    load: float = 0.0
    begun: float = 0.0
    task_delays: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, found: OrchestrationStack, proxy: SlowProxy, seconds: float) -> None:
        self.found = found
        self.proxy = proxy
        self.seconds = seconds
        self.quiet_per_second = 0.0
        self.ends: deque[tuple[float, int]] = deque(maxlen=100_000)

    async def follow(self) -> None:
        """Write down once a second how many rollouts have ended."""
        while True:
            with contextlib.suppress(Exception):  # the store is slow, or full
                self.ends.append((time.monotonic(), await self.found.num_ended()))
            await asyncio.sleep(1)

    def ended_between(self, begin: float, end: float) -> int:
        before = [number for at, number in self.ends if at <= begin]
        upto = [number for at, number in self.ends if at <= end]
        return (upto[-1] if upto else 0) - (before[-1] if before else 0)

    async def measure(self, name: str, *, last: bool) -> Phase:
        phase = Phase(name)
        hogs = self._disturb(name)
        try:
            await asyncio.sleep(SETTLE_SECONDS)
            phase.begun = time.time()
            begun, taken, cpu, logs = time.monotonic(), _cpu_of(hogs), self.found.cpu_seconds(), self._log_bytes()
            await asyncio.sleep(float(name.split()[2]) if name.count(" ") == 2 else self.seconds)
            ended = time.monotonic()
            phase.seconds = ended - begun
            phase.load = os.getloadavg()[0]
            phase.cpu_left = 1 - (_cpu_of(hogs) - taken) / (phase.seconds * _num_cores())
            phase.log_bytes = self._log_bytes() - logs
            used = self.found.cpu_seconds()
        finally:
            for hog in hogs:
                for process in (*psutil.Process(hog.pid).children(recursive=True), hog):
                    process.kill()
                hog.wait()
            self.proxy.delay_seconds = 0.0
        phase.open_rollouts = await self._num_open()
        phase.ended = self.ended_between(begun, ended)
        phase.per_minute = 60 * phase.ended / phase.seconds
        phase.cpu_seconds_per_rollout = {part: (used[part] - cpu[part]) / max(1, phase.ended) for part in used}
        if name == "quiet":
            self.quiet_per_second = phase.ended / phase.seconds
            return phase
        phase.of_share = phase.ended / phase.seconds / max(1e-9, self.quiet_per_second * phase.cpu_left)
        phase.recovered_seconds = await self._recovery(0.0 if last else REST_SECONDS)
        return phase

    def _disturb(self, name: str) -> list[subprocess.Popen[bytes]]:
        kind, *numbers = name.split()
        if kind == "busy":
            return [subprocess.Popen(BUSY) for _ in range(int(numbers[0]))]
        if kind == "disk":
            return [subprocess.Popen([*DISK, str(self.found.home / "disk-hog")])]
        if kind == "postgres":
            self.proxy.delay_seconds = SLOW_QUERY_SECONDS
        return []

    async def measure_restart(self, name: str) -> Phase:
        """End the control plane beside busy processes and start it again; `recovered_seconds`: until a rollout ends."""
        phase = Phase(name, begun=time.time())
        hogs = [subprocess.Popen(BUSY) for _ in range(int(name.partition(" ")[2]))]
        try:
            phase.open_rollouts = await self._num_open()
            for part in CONTROL_PLANE:
                await asyncio.to_thread(self.found.end, part)
            before = self.ends[-1][1]
            begun = time.monotonic()
            for part in reversed(CONTROL_PLANE):
                self.found.spawn(part)
            while self.ends[-1][1] <= before:
                await asyncio.sleep(0.2)
            phase.recovered_seconds = time.monotonic() - begun
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        return phase

    async def _recovery(self, rest: float) -> float | None:
        begun, found = time.monotonic(), None
        while time.monotonic() - begun < max(rest, LOOK_SECONDS + 60):
            await asyncio.sleep(1)
            at = time.monotonic()
            wanted = 0.8 * self.quiet_per_second * LOOK_SECONDS
            if found is None and at - begun >= 1 and self.ended_between(at - LOOK_SECONDS, at) >= wanted:
                found = at - begun
                if not rest:
                    break
        return found

    def _log_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.found.home.glob("*.log"))

    async def _num_open(self) -> int:
        claimed = RolloutTable.claimed_at.is_not(None) & RolloutTable.outcome.is_(None)
        async with self.found.database.begin() as connection:
            return int((await connection.execute(select(func.count()).where(claimed))).scalar_one())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _cpu_of(processes: list[subprocess.Popen[bytes]]) -> float:
    total = 0.0
    for process in processes:
        for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass
class Histories:
    """Facts from Temporal's histories. `tried_again`: tries that Temporal began because of a time-out, (wall time,
    activity and time-out; "never delivered": no worker had begun it). `task_delays`: of workflow tasks, (wall time of
    the start, seconds since it was scheduled).
    """

    tried_again: list[tuple[float, str]] = field(default_factory=list)
    task_delays: list[tuple[float, float]] = field(default_factory=list)

    def percentiles(self, begun: float, ended: float) -> list[float]:
        """Return median, 95th percentile and maximum of the delays between two wall times."""
        values = sorted(delay for at, delay in self.task_delays if begun <= at <= ended)
        return [round(values[int(share * (len(values) - 1))], 3) for share in (0.5, 0.95, 1.0)] if values else []


async def read_histories(client: Client, run_id: str) -> Histories:
    """Read the histories of all rollouts."""
    found = Histories()
    async for one in client.list_workflows(f'WorkflowId STARTS_WITH "rollout/{run_id}/"'):
        scheduled: dict[int, tuple[str, float]] = {}
        async for event in client.get_workflow_handle(one.id, run_id=one.run_id).fetch_history_events():
            at = event.event_time.ToNanoseconds() / 1e9
            started, ended = (
                event.activity_task_started_event_attributes,
                event.activity_task_timed_out_event_attributes,
            )
            if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
                scheduled[event.event_id] = (event.activity_task_scheduled_event_attributes.activity_type.name, at)
            elif event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_SCHEDULED:
                scheduled[event.event_id] = ("", at)
            elif event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED:
                before = scheduled[event.workflow_task_started_event_attributes.scheduled_event_id][1]
                found.task_delays.append((at, at - before))
            for number, failure in (
                (started.scheduled_event_id, started.last_failure),
                (ended.scheduled_event_id, ended.failure),
            ):
                if number and failure.HasField("timeout_failure_info"):
                    timed_out = failure.timeout_failure_info
                    kind = TimeoutType.Name(timed_out.timeout_type)
                    kind += "" if timed_out.last_heartbeat_details.payloads else ", never delivered"
                    found.tried_again.append((at, f"{scheduled[number][0]}, {kind.removeprefix('TIMEOUT_TYPE_')}"))
    return found


@contextlib.asynccontextmanager
async def slow_postgres(found: OrchestrationStack) -> AsyncIterator[SlowProxy]:
    """Put a proxy between Postgres and every other part."""
    url = urlsplit(found.environment["RATCHET_DATABASE_URL"].replace("+asyncpg", ""))
    async with SlowProxy("127.0.0.1", found.stack.ports["postgres"]) as proxy:
        netloc = url.netloc.rpartition(":")[0] + f":{proxy.port}"
        found.beside_postgres = {"RATCHET_DATABASE_URL": urlunsplit(url._replace(netloc=netloc))}
        yield proxy


async def measure(boxes: int, seconds: float, phases: list[str]) -> dict[str, Any]:
    rows = []
    async with orchestration_stack(boxes, 3, real_boxes=True, around=slow_postgres) as (found, client):
        assert found.around is not None
        bench = Bench(found, found.around, seconds)
        config = found.evaluation(20_000, SAMPLES)
        run_id = found.run_id
        await client.start_workflow("TrainRun", {"config": config}, id=f"run/{run_id}", task_queue="control")
        following = asyncio.create_task(bench.follow())
        while not await found.num_ended():
            await asyncio.sleep(1)
        await asyncio.sleep(SETTLE_SECONDS)
        for number, name in enumerate(["quiet", *phases], 1):
            if name.startswith("restart"):
                rows.append(await bench.measure_restart(name))
            else:
                rows.append(await bench.measure(name, last=number == 1 + len(phases)))
            say(str(rows[-1]))
        following.cancel()
        histories = await read_histories(client, run_id)
        tried_again: Counter[str] = Counter()
        for at, what in histories.tried_again:
            phase = max((row for row in rows if row.begun <= at), key=lambda row: row.begun, default=None)
            tried_again[f"{what}, {phase.name if phase else 'before'}"] += 1
        for row in rows:
            row.task_delays = histories.percentiles(row.begun, row.begun + row.seconds)
        verdicts = await found.verdicts()
    return {"phases": [vars(row) for row in rows], "tried_again": tried_again, "verdicts": verdicts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="600 s a phase")
    parser.add_argument("--boxes", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--phases", default="busy 2,busy 8,busy 32,disk,postgres,restart 2")
    options = parser.parse_args()
    machine = {"cores": _num_cores(), "kernel": platform.release(), "load": os.getloadavg()[0]}
    seconds = options.seconds or (600.0 if options.full else 120.0)
    found = asyncio.run(measure(options.boxes, seconds, options.phases.split(",")))
    print(json.dumps({"commit": commit(), "machine": machine, "boxes": options.boxes, **found}, indent=2))
    if any(row["outcome"] not in (None, "graded") for row in found["verdicts"]["rollouts"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
