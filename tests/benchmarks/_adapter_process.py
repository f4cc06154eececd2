"""The adapter as `ratchet part adapter` runs it, with clocks on its event loop and its transactions.

What blocks the loop can only be measured inside the process, and the product has no clocks for it. Run as `python -m
tests.benchmarks._adapter_process SETTINGS_AS_JSON [--clocked]`. With `--clocked` it runs on asyncio's own event loop,
because uvloop's callbacks cannot be timed, and each callback is timed; both cost CPU. GET /bench returns the
measurements and resets them.
"""

import asyncio
import asyncio.events
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import structlog
import uvicorn
import uvloop
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import JSONResponse

from adapter.app import create_adapter_app, server_config
from adapter.gc_tuning import freeze_startup_objects
from adapter.settings import AdapterSettings
from ratchet.trace_export import start_exporting
from store.database import Database

BLOCKING_SECONDS = 0.010


class LoopClock:
    """CPU and wall seconds of each callback on the event loop's thread.

    The CPU time of the thread is what blocks the loop; wall time includes other processes on the same core.
    """

    def __init__(self) -> None:
        self.reset()
        run = asyncio.events.Handle._run
        clock = self

        def timed(handle: asyncio.events.Handle) -> Any:
            wall = time.perf_counter()
            started = time.thread_time()
            try:
                return run(handle)
            finally:
                clock.add(time.thread_time() - started, time.perf_counter() - wall, handle)

        asyncio.events.Handle._run = timed  # type: ignore[method-assign, assignment]

    def reset(self) -> None:
        self.num = 0
        self.total = 0.0
        self.longest = 0.0
        self.blocking = Counter[str]()
        self.longest_wall = 0.0
        self.num_blocking_wall = 0
        self.longest_in = ""

    def add(self, seconds: float, wall_seconds: float, handle: asyncio.events.Handle) -> None:
        self.num += 1
        self.total += seconds
        self.longest_wall = max(self.longest_wall, wall_seconds)
        self.num_blocking_wall += wall_seconds > BLOCKING_SECONDS
        if seconds > self.longest:
            self.longest = seconds
            self.longest_in = _name(handle)
        if seconds > BLOCKING_SECONDS:
            self.blocking[_name(handle)] += 1


def _name(handle: asyncio.events.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    return getattr(coroutine, "__qualname__", None) or getattr(callback, "__qualname__", type(callback).__name__)


class CollectorClock:
    """CPU seconds of garbage collections, which stop the callback that triggers them."""

    def __init__(self) -> None:
        self.reset()
        gc.callbacks.append(self.record)

    def reset(self) -> None:
        self.longest = 0.0
        self.generation = 0
        self.num_blocking = 0
        self.started = time.thread_time()

    def record(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.started = time.thread_time()
            return
        seconds = time.thread_time() - self.started
        if seconds > self.longest:
            self.longest = seconds
            self.generation = info["generation"]
        self.num_blocking += seconds > BLOCKING_SECONDS


class TimedDatabase(Database):
    num = 0
    seconds = 0.0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        started = time.monotonic()
        async with super().begin() as connection:
            yield connection
        self.num += 1
        self.seconds += time.monotonic() - started

    async def read(self, *arguments: Any) -> Any:
        started = time.monotonic()
        found = await super().read(*arguments)
        self.num += 1
        self.seconds += time.monotonic() - started
        return found

    async def fetch(self, statement: str, *values: object) -> list[Any]:
        started = time.monotonic()
        rows = await super().fetch(statement, *values)
        self.num += 1
        self.seconds += time.monotonic() - started
        return rows


async def main(settings: AdapterSettings) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))  # as `serve_adapter` does
    start_exporting("adapter")  # as `ratchet part adapter` does, if the environment names a collector
    clock = LoopClock()
    collector = CollectorClock()
    database = TimedDatabase(settings.database_url, settings.pool_size)  # as it does
    app = create_adapter_app(settings, database)
    process = psutil.Process()
    freeze_startup_objects()  # as `serve_adapter` does

    async def bench(request: Request) -> JSONResponse:
        found = {
            "resident_bytes": process.memory_info().rss,
            "cpu_seconds": time.process_time(),
            "callbacks": clock.num,
            "callback_cpu_seconds": clock.total,
            "longest_callback_ms": 1e3 * clock.longest,
            "longest_callback_wall_ms": 1e3 * clock.longest_wall,
            "callbacks_above_10_ms_wall": clock.num_blocking_wall,
            "longest_callback_in": clock.longest_in,
            "callbacks_above_10_ms": dict(clock.blocking),
            "longest_collection_ms": 1e3 * collector.longest,
            "longest_collection_generation": collector.generation,
            "collections_above_10_ms": collector.num_blocking,
            "transactions": database.num,
            "transaction_seconds": database.seconds,
        }
        clock.reset()
        collector.reset()
        database.num = 0
        database.seconds = 0.0
        return JSONResponse(found)

    app.add_route("/bench", bench)
    await uvicorn.Server(server_config(app, settings)).serve()


if __name__ == "__main__":
    run = asyncio.run if "--clocked" in sys.argv else uvloop.run
    run(main(AdapterSettings.model_validate_json(sys.argv[1])))
