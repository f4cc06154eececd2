"""The learner service: keep one driver process for every run that is running.

The learner is not called by workflows; the service polls Postgres for runs that need one. A driver is `python -P -m
training.service RUN_ID SERVICE_PID`. It ends by itself when its run has ended, is paused by the learner, or is
trained by another learner.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
from asyncio import StreamReader
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import structlog

from ratchet import paths
from ratchet.background_task import errors_logged, stop_event
from ratchet.config import RunConfig
from ratchet.errors import BugError
from ratchet.logs import is_json, json_object
from ratchet.stored_config import read_stored_config
from store import learners, runs
from store.database import Database
from store.migration import wait_for_schema
from training.ray_demand import note_ray_demand

_LOG = structlog.get_logger()

_URL_VARIABLE = "RATCHET_DATABASE_URL"
_POLL_SECONDS = 1.0
_REST_SECONDS = 5.0
"""Time between two looks while no run wants a learner."""
_GPUS = Path("/proc/driver/nvidia/gpus")
_MAX_BACKOFF_SECONDS = 30.0
_LAST_LINES_SECONDS = 5.0
_TERMINATE_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL to a driver."""
_SILENT_SECONDS = 20.0
"""A driver that ended by itself may have been fenced by the driver of another service; it is started again once the
learner has been silent for this long."""
_FRESH_SECONDS = 12.0
"""A learner with a heartbeat as new as this is at work for another service, or died a moment ago; it is left alone."""
_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 1 << 20
"""A longer line is left out."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"^\((\w+ pid=\d+(?:, ip=[^)\s]+)?)\) ")
_RAY_DEFAULTS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else Ray makes an environment per `uv run`
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # a busy laptop imports torch slowly
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else every line is printed twice
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a preemption is handled like a death, by the checkpoint
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
"""Defaults of Ray's environment variables."""


def default_workers(config: RunConfig) -> int:
    """Return `training.workers`, or its default: a rank per GPU of `training.gpus`; without it one on a machine with a
    GPU or with up to three CPU cores, two from four cores on."""
    if config.training.workers is None and config.training.gpus:
        return sum(map(len, config.training.gpus.values()))
    is_large = (os.cpu_count() or 1) >= 4 and not _GPUS.is_dir()
    return config.training.workers or (2 if is_large else 1)


def drive_run(run_id: str, url: str, service_pid: int) -> None:
    """Run the driver of one run. It dies with its service, and Ray ends the ranks of a driver that has died."""
    die_with_service(service_pid)
    for name, value in _RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from training.rank_runtime import RankSettings
    from training.ray_driver import run_driver

    config = asyncio.run(_read_config(run_id, url))
    num_threads = config.training.num_threads
    directories = paths.policies(), paths.checkpoints()
    run_driver(RankSettings(run_id, url, *directories, num_threads, paths.home()), default_workers(config))


def die_with_service(service_pid: int) -> None:
    """Let the kernel kill this process once its parent, the service, has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != service_pid:
        sys.exit("the learner service is gone")


async def _read_config(run_id: str, url: str) -> RunConfig:
    async with Database(url, pool_size=1) as database:
        await wait_for_schema(database)
        row = await database.run(runs.get_run, run_id)
    if row is None:
        raise BugError(f"run {run_id} does not exist")
    return read_stored_config(row.config)


async def run_learner_service(url: str) -> None:
    """Run until SIGTERM or SIGINT. A driver that dies is started again, with a backoff of at most 30 s."""
    database = Database(url, pool_size=1)
    await wait_for_schema(database)
    stopping = stop_event()
    keepers: dict[str, asyncio.Task[None]] = {}
    dumps = asyncio.create_task(_keep_dumps(url))
    ended: set[str] = set()
    while not stopping.is_set():
        try:
            wanted = await database.run(learners.runs_wanting_learner)
        except Exception as error:  # any: the end of this service is the end of every run's driver
            _LOG.warning("waiting for postgres", reason=str(error)[:200])
            wanted = {}
        if wanted or keepers:  # a run that is paused, or a store that is away, keeps its learner
            with contextlib.suppress(OSError):  # a full disk, for example: drivers go on
                note_ray_demand(paths.home())
        for run_id in [run_id for run_id, keeper in keepers.items() if keeper.done()]:
            keepers.pop(run_id)
            ended.add(run_id)
        for run_id, silent_seconds in wanted.items():
            patience_seconds = _SILENT_SECONDS if run_id in ended else _FRESH_SECONDS
            if run_id not in keepers and (silent_seconds is None or silent_seconds > patience_seconds):
                keepers[run_id] = asyncio.create_task(_keep_driver(run_id, url))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _POLL_SECONDS if wanted or keepers else _REST_SECONDS)
    for keeper in (*keepers.values(), dumps):
        keeper.cancel()
    await asyncio.gather(*keepers.values(), dumps, return_exceptions=True)
    await database.close()


async def _keep_driver(run_id: str, url: str) -> None:
    """Restart the driver until it ends by itself."""
    backoff = 1.0
    while not await _drive_once(run_id, url):
        await asyncio.sleep(backoff)
        backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)


async def _drive_once(run_id: str, url: str) -> bool:
    """Run one driver and return whether it ended by itself.

    An error, such as a fork that fails for lack of memory, counts as its death: it must not leave this run's task.
    """
    process = None
    code = None
    with errors_logged("driver not kept", run=run_id):
        try:
            _LOG.info("driver starts", run=run_id)
            command = [sys.executable, "-P", "-m", "training.service", run_id, str(os.getpid())]
            # Ray puts the driver's working directory in front of the ranks' module path. The state directory has no
            # module.
            environment = {**os.environ, _URL_VARIABLE: url, "RATCHET_HOME": str(paths.home())}
            process = await _start_driver(command, environment)
            code = await _wait_for_driver(process, run_id)
        finally:
            if process is not None:
                await _terminate(process)
    if code == 0:
        _LOG.info("driver ended", run=run_id)
    else:
        _LOG.warning("driver died", run=run_id, code=code)
    return code == 0


async def _keep_dumps(url: str) -> None:
    """Run the process that writes debug dumps as long as a command has asked for some."""
    environment = {**os.environ, _URL_VARIABLE: url, "RATCHET_HOME": str(paths.home())}
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        with errors_logged("dumps not written"):
            if any(paths.dump_requests().glob("*")):
                command = (sys.executable, "-P", "-m", "training.rollout_dumps", str(os.getpid()))
                process = await asyncio.create_subprocess_exec(*command, env=environment)
                try:
                    await process.wait()
                finally:
                    await _terminate(process)


async def _start_driver(command: list[str], environment: dict[str, str]) -> Process:
    """Start the driver. Its lines go into the service's own log or, if that has JSON, to a pipe."""
    pipes: dict[str, Any] = {}
    if is_json():
        environment = {**environment, "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"}
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT, "limit": _MAX_LINE_BYTES}
    return await asyncio.create_subprocess_exec(*command, env=environment, cwd=paths.home(), **pipes)


async def relay_lines(stream: StreamReader, run_id: str) -> None:
    """Print every line of a driver and its ranks as one JSON object, until the stream ends.

    Ray puts the name of its process before a rank's line. That is removed from the lines of our own logger, and any
    other line becomes an object of its own.
    """
    while True:
        try:
            raw = await stream.readline()
        except ValueError:  # over the limit; what is left of it is read as the next line
            continue
        if not raw:
            return
        text = _COLOURS.sub("", raw.decode(errors="replace")).rstrip()
        if not text:
            continue
        found = _PROCESS.match(text)
        line = text[found.end() :] if found else text
        try:
            if json_object(line) is not None:
                print(line, flush=True)
            else:
                _LOG.info(line, run_id=run_id, process=found[1] if found else "driver")
        except (OSError, UnicodeError):  # a line that cannot be written must not stop the driver, which waits for us
            continue


async def _wait_for_driver(process: Process, run_id: str) -> int:
    """Print the driver's lines until it has ended, and return its exit code."""
    if process.stdout is None:
        return await process.wait()
    relay = asyncio.create_task(relay_lines(process.stdout, run_id))
    try:
        code = await process.wait()
        await asyncio.wait({relay}, timeout=_LAST_LINES_SECONDS)  # a process that it has left may hold the pipe open
        return code
    finally:
        relay.cancel()


async def _terminate(process: Process) -> None:
    """Send SIGTERM, so that Ray ends the ranks with the driver; after SIGKILL the Ray cluster does it later."""
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(_TERMINATE_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    drive_run(sys.argv[1], os.environ[_URL_VARIABLE], int(sys.argv[2]))
