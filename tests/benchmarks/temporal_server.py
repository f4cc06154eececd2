"""Temporal's own server on Postgres beside the dev server of its CLI: speed, CPU, start, recovery from kill -9, disk.

Both run the same workflows of six activities each, forty at once, with the same worker, one server after the other in
one run; `--full` repeats that in turns. The dev server commits without waiting for the disk (`synchronous=normal`),
Postgres waits at each commit.
"""

import asyncio
import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import orjson
import psutil
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.service import RPCError
from temporalio.worker import Worker

from cli.console import say
from ratchet import temporal_client
from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack
from stack.postgres import DATABASE, ensure_database
from stack.temporal_build import ensure_server_program
from stack.temporal_server import TemporalKind, ensure_temporal_cli
from tests.benchmarks._commit import commit
from tests.benchmarks._options import asks_for_all_repetitions
from tests.free_ports import free_ports

ACTIVITIES = 6
AT_ONCE = 40
QUEUE = "bench"
PATIENCE_SECONDS = 180.0


@activity.defn
async def do_nothing(number: int) -> int:
    return number


@workflow.defn(sandboxed=False)
class SixActivities:
    @workflow.run
    async def run(self) -> int:
        total = 0
        for number in range(ACTIVITIES):
            total += await workflow.execute_activity(
                do_nothing,
                number,
                start_to_close_timeout=timedelta(seconds=30),
                heartbeat_timeout=timedelta(seconds=20),
            )
        return total


class Server:
    """One kind of server with an empty store in `home`; Postgres runs only for `server`."""

    def __init__(self, kind: TemporalKind, home: Path) -> None:
        free_ports(home)
        self.kind = kind
        self.stack = Stack(home)
        self.environment = {**os.environ, **self.stack.environment(), "NO_PROXY": "127.0.0.1"}
        self.settings = load_temporal_settings().model_copy(
            update={"address": f"127.0.0.1:{self.stack.ports['temporal']}"}
        )
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self, part: str, *arguments: str) -> None:
        command = [sys.executable, "-P", "-m", "cli.main", "part", part, *arguments]
        with (self.stack.home / f"{part}.log").open("ab") as log:
            self.processes[part] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    async def start_postgres(self) -> None:
        if self.kind is TemporalKind.SERVER:
            self.spawn("postgres")
            await ensure_database(self.stack.ports["postgres"])

    async def start(self) -> float:
        """Start the server and return the seconds until its namespace answers."""
        started = time.monotonic()
        self.spawn("temporal", *(["--dev"] if self.kind is TemporalKind.DEV else []))
        await self.client()
        return time.monotonic() - started

    async def client(self) -> Client:
        return await temporal_client.connect_temporal(self.settings, PATIENCE_SECONDS)

    def end(self, part: str, kill: bool = False) -> None:
        process = self.processes.pop(part)
        process.kill() if kill else process.terminate() if part != "postgres" else process.send_signal(2)
        process.wait(60)

    def cpu_seconds(self, part: str) -> float:
        """CPU of the part's process tree, with children that have ended."""
        root = psutil.Process(self.processes[part].pid)
        return sum(_cpu(process) for process in (root, *root.children(recursive=True)))

    async def disk(self) -> dict[str, int]:
        """Bytes of the stores, and for Postgres of the write-ahead log so far."""
        if self.kind is TemporalKind.DEV:
            return {"store": sum(path.stat().st_size for path in self.stack.home.glob("temporal.db*"))}
        connection = await asyncpg.connect(self.environment["RATCHET_DATABASE_URL"])
        try:
            sizes = await connection.fetchval(
                "SELECT sum(pg_database_size(datname)) FROM pg_database WHERE datname LIKE $1", f"{DATABASE}_temporal%"
            )
            wal = await connection.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')")
            return {"store": int(sizes), "write_ahead_log": int(wal)}
        finally:
            await connection.close()


def _cpu(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


@contextlib.contextmanager
def server(kind: TemporalKind) -> Iterator[Server]:
    home = Path(tempfile.mkdtemp(prefix="ratchet-bench-"))
    home.chmod(0o755)  # the embedded Postgres runs as another user
    found = Server(kind, home)
    try:
        yield found
    finally:
        for part in reversed(list(found.processes)):
            found.end(part)
        shutil.rmtree(home, ignore_errors=True)


@contextlib.asynccontextmanager
async def worker(client: Client) -> AsyncIterator[None]:
    async with Worker(client, task_queue=QUEUE, workflows=[SixActivities], activities=[do_nothing]):
        yield


async def run_workflows(client: Client, prefix: str, count: int, done: Callable[[], None] = lambda: None) -> None:
    """Run `count` workflows, AT_ONCE at a time, through outages of the server."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with slots:
            handle = await _until_it_works(
                lambda: client.start_workflow(
                    SixActivities.run,
                    id=f"{prefix}-{number}",
                    task_queue=QUEUE,
                    id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,  # the answer of a start may be lost
                )
            )
            assert await _until_it_works(handle.result) == sum(range(ACTIVITIES))
            done()

    await asyncio.gather(*(one(number) for number in range(count)))


async def _until_it_works(call: Callable[[], Awaitable[Any]]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await call()
        except RPCError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


async def measure_load(found: Server, count: int) -> dict[str, float]:
    client = await found.client()
    async with worker(client):
        await run_workflows(client, "warm", AT_ONCE)
        parts = list(found.processes)
        before, disk = {part: found.cpu_seconds(part) for part in parts}, await found.disk()
        started = time.monotonic()
        await run_workflows(client, "load", count)
        seconds = time.monotonic() - started
        used = {f"cpu_seconds_per_workflow_{part}": (found.cpu_seconds(part) - before[part]) / count for part in parts}
        grown = {
            f"{name}_bytes_per_workflow": (value - disk[name]) / count for name, value in (await found.disk()).items()
        }
    resident = psutil.Process(found.processes["temporal"].pid).memory_info().rss / (1 << 20)
    return {"workflows_per_second": count / seconds, **used, **grown, "server_resident_mebibytes": resident}


async def measure_recovery(found: Server, count: int) -> dict[str, float]:
    """kill -9 of the server after half of the workflows; it is started at once, as the supervisor does it."""
    client, ended = await found.client(), list[float]()
    async with worker(client):
        load = asyncio.create_task(run_workflows(client, "kill", count, lambda: ended.append(time.monotonic())))
        while len(ended) < count // 2:
            await asyncio.sleep(0.05)
        found.end("temporal", kill=True)
        killed = time.monotonic()
        start_seconds = await found.start()
        await load
    after = [at for at in ended if at > killed]
    return {
        "recovery_server_seconds": start_seconds,
        "recovery_first_workflow_seconds": min(after) - killed,
        "recovery_all_workflows_seconds": max(after) - killed,
        "recovery_workflows_ended": len(ended),
        "recovery_workflows_started": count,
    }


async def measure_idle(found: Server, seconds: float) -> dict[str, float]:
    before = {part: found.cpu_seconds(part) for part in found.processes}
    await asyncio.sleep(seconds)
    return {f"idle_cpu_share_{part}": (found.cpu_seconds(part) - used) / seconds for part, used in before.items()}


async def measure(kind: TemporalKind, count: int, idle_seconds: float) -> dict[str, float]:
    with server(kind) as found:
        await found.start_postgres()
        first = await found.start()
        found.end("temporal")
        facts = {"first_start_seconds": first, "next_start_seconds": await found.start()}
        facts |= await measure_idle(found, idle_seconds)
        facts |= await measure_load(found, count)
        facts |= await measure_recovery(found, count // 2)
    return facts


async def measure_both(rounds: int, count: int, idle_seconds: float) -> dict[str, Any]:
    seen: dict[TemporalKind, list[dict[str, float]]] = {kind: [] for kind in TemporalKind}
    for number in range(rounds):
        for kind in TemporalKind:
            say(f"round {number + 1} of {rounds}: {kind}")
            seen[kind].append(await measure(kind, count, idle_seconds))
    return {
        str(kind): {name: round(median(facts[name] for facts in all_facts), 4) for name in all_facts[0]}
        for kind, all_facts in seen.items()
    }


def main() -> None:
    full = asks_for_all_repetitions(__doc__)
    Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=None)))  # it would log to stdout
    rounds, count = (3, 1000) if full else (1, 400)
    ensure_server_program(say)
    ensure_temporal_cli(say)
    load = os.getloadavg()[0]
    found = asyncio.run(measure_both(rounds, count, idle_seconds=20.0))
    machine = {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load_before": round(load, 2)}
    facts = {"commit": commit(), "machine": machine, "rounds": rounds, "workflows": count, "at_once": AT_ONCE}
    sys.stdout.buffer.write(orjson.dumps({**facts, **found}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
