"""Wait until every part answers; say why one does not, from the watcher's file and the part's log."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from ratchet.durations import duration_in_words
from ratchet.errors import MachineError
from ratchet.progress import ReportProgress
from stack.part_health import HealthState, PartHealth, health_path, health_written_at, read_fresh_health
from stack.part_logs import FOR_A_PERSON, first_error, log_size
from stack.parts import VIEWER, WATCHER, Stack
from stack.supervisor import Supervisor

_T = TypeVar("_T")
LogSizes = dict[str, int]
"""Part → bytes of its log at some moment."""

_LOOK_SECONDS = 0.5
_REPORT_SECONDS = 15.0
_WATCHER_SECONDS = 300.0
_MAX_SLOW_STARTS = 2
"""Starts of a part without an answer in its time, the second of which had twice as long."""
_MAX_ENDS = 3
"""Ends of a part during one `up` after which waiting on is useless."""


def part_log(stack: Stack, part: str) -> Path:
    return stack.home / "logs" / f"{part}.log"


def log_sizes(stack: Stack) -> LogSizes:
    """Return the sizes of all logs now; what is behind them later is new."""
    return {part.name: log_size(part_log(stack, part.name)) for part in stack.parts()}


async def answer_of(stack: Stack, name: str, answer: Awaitable[_T], starts: LogSizes, say: ReportProgress) -> _T:
    """Return an answer of the part `name`, which may be starting. Raises as `wait_until_answering` does."""
    task = asyncio.ensure_future(answer)
    try:
        await wait_until_answering(stack, starts, say, task, name)
        return await task
    finally:
        task.cancel()


async def wait_until_answering(
    stack: Stack, starts: LogSizes, say: ReportProgress, answer: "asyncio.Future[_T] | None" = None, name: str = ""
) -> None:
    """Wait until the newest probe of every part has succeeded; or for an answer of the part `name`.

    Raises MachineError with the part's last error if it is given up, ends again and again, ended by an error of the
    user, or has not answered after two starts, the second of which had twice its limit.
    """
    began, reported_at = time.time(), time.monotonic()
    while True:
        open_parts = _open_parts(stack, began)
        if not open_parts if answer is None else answer.done():
            return
        _require_watcher(stack, starts.get(WATCHER, 0), began)
        for part in open_parts:
            if name in ("", part.name):
                _require_hope(stack, part, starts.get(part.name, 0), began)
        if time.monotonic() - reported_at > _REPORT_SECONDS:
            reported_at = time.monotonic()
            waiting = (f"{part.name} ({part.reason})" if part.reason else part.name for part in open_parts)
            say(f"not ready after {duration_in_words(time.time() - began)}: {', '.join(waiting)}")
        await asyncio.sleep(_LOOK_SECONDS)


def _require_watcher(stack: Stack, start: int, began: float) -> None:
    """Raise MachineError if nothing has been heard of the watcher for long: without it no part is known to answer."""
    silent_seconds = time.time() - max(began, health_written_at(stack.home) or 0.0)
    if silent_seconds > _WATCHER_SECONDS:
        reason = first_error(part_log(stack, WATCHER), start) or "a full disk, for example"
        raise MachineError(
            f"the {WATCHER} has written nothing to {health_path(stack.home)} for {duration_in_words(silent_seconds)} "
            f"({reason}); see `ratchet admin logs {WATCHER}`"
        )


def _open_parts(stack: Stack, began: float) -> list[PartHealth]:
    """Return the parts that do not answer yet, or whose state in the file is that of an earlier process."""
    supervisor = Supervisor(stack)
    if not supervisor.is_up():
        raise MachineError("the stack was stopped meanwhile; `ratchet admin logs supervisord` shows by what")
    health = read_fresh_health(stack.home) or {}
    found = []
    for process in supervisor.states():
        part = health.get(process.name, PartHealth(process.name, HealthState.STARTING, began))
        is_answering = part.state is HealthState.ANSWERING and part.pid == process.pid
        if process.name not in (WATCHER, VIEWER) and not is_answering:
            found.append(part)
    return found


def _require_hope(stack: Stack, part: PartHealth, start: int, began: float) -> None:
    error = first_error(part_log(stack, part.name), start)
    if part.state is HealthState.GIVEN_UP and part.since > began:
        problem = part.reason
    elif sum(at > began for at in part.short_lives) >= _MAX_ENDS:
        problem = f"its process has ended {_MAX_ENDS} times"
    elif FOR_A_PERSON.search(part.last_error) and part.short_lives and part.short_lives[-1] > began:
        problem = "it cannot work"
    elif part.slow_starts >= _MAX_SLOW_STARTS and part.since > began:
        problem = part.reason
    else:
        return
    reason = error or part.last_error
    raise MachineError(
        f"{part.name} does not come up: {problem}"
        + (f"; its error: {reason}" if reason and reason not in problem else "")
        + f"; see `ratchet admin logs {part.name}`"
    )
