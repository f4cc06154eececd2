"""The watcher: probe every part every few seconds, restart a part that does not answer for long, record what it finds.

The states and their transitions are in `stack/part_health.py`, the probes in `stack/probes.py`. Each probe runs in its
own task with its own time limit, so none delays another. If the watcher itself did not run for a while (it was killed,
or the machine was suspended or overloaded), that time counts against no part and no rollout.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import structlog
from sqlalchemy.exc import DBAPIError

from ratchet.background_task import stop_event
from ratchet.errors import MachineError, RatchetError
from ratchet.secrets import without_secrets
from ratchet.temporal_settings import load_temporal_settings
from stack.cpu_meter import tree_cpu_seconds
from stack.outage_log import OutageLog
from stack.part_health import (
    SLOWEST_PACE,
    HealthAction,
    HealthLimits,
    HealthState,
    PartHealth,
    health_written_at,
    read_health,
    write_health,
)
from stack.part_logs import first_error, log_size
from stack.parts import WATCHER, Part, Stack
from stack.placement import part_kind, set_of_part
from stack.probes import NEEDS, ProbeFailedError, Probes, is_late, is_missed, limits_of
from stack.readiness import log_sizes, part_log
from stack.supervisor import PartState, Supervisor
from store import open_runs

_LOG = structlog.get_logger("ratchet.watcher")
_LOOK_SECONDS = 1.0
_REST_AFTER_SECONDS = 120.0
"""Time without an open run, in which every part has answered, after which looks and probes are rare."""
_REST_LOOK_SECONDS = 5.0
_REST_PROBE_SECONDS = 60.0
_SLOW_PATIENCE = 3.0
"""A probe of a slow part gets so many times its limit."""
_BUSY_PACE = 0.75
"""The machine's pace below which it is busy."""
_USED_SHARE = 0.02
"""CPU seconds per second above which a process does something; one that hangs uses none."""
_OWN_GAP_SECONDS = 3.0
"""Wall time between two looks above which the watcher itself did not run. The monotonic clock stands still while a
machine is suspended, unlike the clock of the rollouts' limits."""
_UNOBSERVED_SECONDS = 30.0
"""A gap that is longer counts as an outage. A busy machine makes shorter ones, and then the parts work."""
_WANTED = {"starting", "running", "backoff", "exited"}
"""supervisord's states of a part that runs or that it starts again by itself."""
_MAX_REASON_CHARS = 200
_STORE_SECONDS = 5.0


class Watcher:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.supervisor = Supervisor(stack)
        self.parts = {part.name: part for part in stack.parts() if part.name != WATCHER}
        self.external = [name for name in ("postgres", "temporal") if name not in self.parts]
        if stack.has_box_host:  # whose outages are not the rollouts' time
            self.external += ["gateway", *stack.box_gateways()]
        known = read_health(stack.home)
        self.health = {name: known.get(name, PartHealth(name)) for name in (*self.parts, *self.external)}
        self.states: dict[str, PartState] = {}
        self.probes = Probes(stack, load_temporal_settings(), lambda name: self.health[name].pid)
        self.running: dict[str, asyncio.Task[None]] = {}
        self.probed_at: dict[str, float] = {}
        self.pace = 1.0
        self.busy_at = time.monotonic()
        """The newest time at which a run was open or a part did not answer."""
        self.late_at: dict[str, tuple[float, float]] = {}
        """Part → time of its newest late probe, and CPU seconds of its process tree by then."""
        self.log_sizes = log_sizes(stack)  # at the newest look
        self.log_starts = dict(self.log_sizes)  # before the lines of the current process
        self.ending: set[asyncio.Task[None]] = set()
        self.pausing: asyncio.Task[None] | None = None
        self.outages = OutageLog(stack)
        self.recording: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set. What it began to end is then ended by the next watcher."""
        looked_at = health_written_at(self.stack.home) or time.time()
        while not stop.is_set():
            looked_at = self._see_gap(looked_at, time.time())
            await self._look()
            try:
                write_health(self.stack.home, list(self.health.values()), time.time())
            except OSError as error:  # a full disk, for example: the parts must be watched all the same
                _LOG.warning("state of the parts not written", reason=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self.look_seconds)
        for task in (*self.running.values(), *self.ending, self.pausing, self.recording):
            if task is not None:
                task.cancel()
        await self.probes.close()

    @property
    def is_resting(self) -> bool:
        return time.monotonic() - self.busy_at > _REST_AFTER_SECONDS

    @property
    def look_seconds(self) -> float:
        return _REST_LOOK_SECONDS if self.is_resting else _LOOK_SECONDS

    def _see_gap(self, looked_at: float, now: float) -> float:
        """Take in the time since the last look, of this watcher or the one before, and return `now`."""
        gap = now - looked_at
        self.pace = machine_pace(gap, self.look_seconds)
        for health in self.health.values():
            if gap > self.look_seconds + _OWN_GAP_SECONDS:
                health.hold(gap)
            else:
                health.pass_time(max(0.0, gap), self.pace)  # the clock may have been set back
        if gap > _UNOBSERVED_SECONDS:
            self.outages.note(WATCHER, looked_at, now)
        return now

    async def _look(self) -> None:
        try:
            states = await asyncio.to_thread(self.supervisor.known_states)
        except MachineError as error:  # it is suspended
            _LOG.warning("parts not looked at", reason=str(error))
            return
        if states is None:
            return  # nothing is known now
        with contextlib.suppress(OSError):  # without the directory, supervisord cannot start a part that has ended
            part_log(self.stack, "").parent.mkdir(exist_ok=True)
        self.states = {state.name: state for state in states}
        for name in self.stack.box_gateways().keys() - self.health.keys():  # a launch has added a host
            self.external.append(name)
            self.health[name] = PartHealth(name)
        for name, health in self.health.items():
            limits = limits_of(name)
            if name in self.external:
                if health.state is HealthState.STOPPED:
                    health.enter(HealthState.STARTING, time.time())
            else:
                self._see_process(name, health)
            self._start_probe(name, health, limits)
            action = health.act(limits, self._missing(name), time.time())
            if action is HealthAction.RESTART and name not in self.external:
                self._restart(name, health)
        if self.pausing is None or self.pausing.done():
            self.pausing = asyncio.create_task(self._pause_runs())
        at_rest = (HealthState.ANSWERING, HealthState.STOPPED)
        if self.probes.has_open_run or any(one.state not in at_rest for one in self.health.values()):
            self.busy_at = time.monotonic()
        self.outages.see(self.health, time.time())
        if self.outages.is_due and (self.recording is None or self.recording.done()):
            self.recording = asyncio.create_task(self._record_outages())

    def _see_process(self, name: str, health: PartHealth) -> None:
        state = self.states.get(name)
        wanted = state is not None and state.state in _WANTED
        pid, started_at = (state.pid, state.started_at) if state is not None else (None, health.started_at)
        size = log_size(part_log(self.stack, name))
        error = self._log_error(name) if health.num_ended(pid, started_at) else ""
        if (pid, started_at) != (health.pid, health.started_at):  # what it has written since the look before is its own
            self.log_starts[name] = self.log_sizes.get(name, size)
        self.log_sizes[name] = size
        before = health.restarts
        action = health.see_process(pid, started_at, wanted, time.time(), error)
        if health.restarts > before:
            _LOG.warning("part has ended", part=name, restarts=health.restarts, error=health.last_error)
        if action is HealthAction.STOP:
            _LOG.error("part is given up", part=name, error=health.last_error)
            self.supervisor.stop(name, wait=False)

    def _log_error(self, name: str) -> str:
        """Return the first error that the part's current process has logged."""
        return first_error(part_log(self.stack, name), self.log_starts.get(name, 0))

    def _missing(self, name: str) -> str | None:
        """Return a part that `name` needs and that does not answer."""
        for needed in NEEDS.get(part_kind(name), ()):
            if needed in self.health and self.health[needed].state is not HealthState.ANSWERING:
                return needed
        return None

    def _start_probe(self, name: str, health: PartHealth, limits: HealthLimits) -> None:
        if name in self.running and not self.running[name].done():
            return
        if health.pid is None and name not in self.external:
            return
        interval = _LOOK_SECONDS if health.state is HealthState.STARTING else limits.interval_seconds
        interval = max(interval, _REST_PROBE_SECONDS) if self.is_resting else interval
        if time.monotonic() - self.probed_at.get(name, 0.0) < interval:
            return
        self.probed_at[name] = time.monotonic()
        self.running[name] = asyncio.create_task(self._probe(health, self.probes.of(name), limits))

    async def _probe(
        self, health: PartHealth, probe: Callable[[], Awaitable[str]] | None, limits: HealthLimits
    ) -> None:
        pid = health.pid
        limit = limits.probe_seconds * (_SLOW_PATIENCE if health.state is HealthState.SLOW else 1)
        try:
            if pid is not None and _is_suspended(pid):
                raise ProbeFailedError("its process is suspended (SIGSTOP)")
            async with asyncio.timeout(limit):
                detail = await probe() if probe is not None else ""
        except Exception as error:  # any error of a probe means that the part does not answer
            if pid == health.pid:
                logged = self._log_error(health.name)
                words = f"; its log: {logged}" if logged else ""
                words += "; the machine is busy" if self.pace < _BUSY_PACE else ""
                restart_helps = not isinstance(error, ProbeFailedError) or error.restart_helps
                is_slow = is_late(error) and self._is_slow(health)
                health.see_failure(_reason(error, limit) + words, time.time(), restart_helps, is_slow)
        else:
            if pid == health.pid:  # else the answer was that of a process which has ended
                self.late_at.pop(health.name, None)
                health.see_success(detail, time.time())

    def _is_slow(self, health: PartHealth) -> bool:
        """Return whether a part whose probe was late is slow, by the second table of `stack/part_health.py`."""
        now, used = time.monotonic(), tree_cpu_seconds(health.pid) if health.pid is not None else 0.0
        before = self.late_at.get(health.name)
        self.late_at[health.name] = now, used
        return before is None or self.pace < _BUSY_PACE or abs(used - before[1]) > _USED_SHARE * (now - before[0])

    async def _pause_runs(self) -> None:
        """Pause the runs that need a part which was given up, once; as long as Postgres is away it is tried again."""
        given_up = [health for health in self.health.values() if health.state is HealthState.GIVEN_UP]
        for health in given_up:
            if health.runs_paused or not is_missed(health.name, self.health):
                continue
            last = f"; its error: {health.last_error}" if health.last_error else ""
            try:
                async with (
                    asyncio.timeout(_STORE_SECONDS),
                    self.stack.database() as database,
                    database.begin() as store,
                ):
                    reason = f"{health.name} is given up: {health.reason}{last}"
                    only_with_rollouts = health.name not in ("learner", "ray")
                    await open_runs.pause_all_runs(store, reason, only_with_rollouts, set_of_part(health.name))
            except (RatchetError, TimeoutError, DBAPIError) as error:
                _LOG.warning("runs not paused yet", part=health.name, reason=str(error)[:_MAX_REASON_CHARS])
                continue
            health.runs_paused = True
            _LOG.warning("runs paused", part=health.name)

    async def _record_outages(self) -> None:
        """Write the outages seen so far; as long as Postgres is away it is tried again."""
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                await self.outages.write()
        except (RatchetError, TimeoutError, DBAPIError) as error:  # a store that is not migrated yet lacks the table
            _LOG.info("outages not recorded yet", reason=str(error)[:_MAX_REASON_CHARS])

    def _restart(self, name: str, health: PartHealth) -> None:
        _LOG.warning("part is restarted", part=name, reason=health.reason)
        task = asyncio.create_task(asyncio.to_thread(end_part, self.parts[name], health.pid))
        self.ending.add(task)
        task.add_done_callback(self.ending.discard)


def machine_pace(gap_seconds: float, look_seconds: float) -> float:
    """Return the machine's pace by the kernel's pressure of the last ten seconds, and by how late this look comes."""
    stalled = [max(0.0, 1 - look_seconds / gap_seconds)] if gap_seconds > 0 else [0.0]
    for resource in ("cpu", "io", "memory"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a kernel that does not measure it
            stalled.append(float(Path(f"/proc/pressure/{resource}").read_text().split("avg10=")[1].split()[0]) / 100)
    return max(SLOWEST_PACE, 1 - max(stalled))


def _reason(error: Exception, limit_seconds: float) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, TimeoutError) and not text:
        return f"no answer within {limit_seconds:.0f} s"
    if not isinstance(error, RatchetError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return without_secrets(text)[:_MAX_REASON_CHARS]


def _is_suspended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def end_part(part: Part, pid: int | None) -> None:
    """End a part's process, first with its stop signal, then with SIGKILL; supervisord starts another one. Blocks.

    A suspended process gets SIGKILL at once. The processes that the part has started end with it, except those of a
    part whose `stop_group` is False.
    """
    if pid is None:
        return
    try:
        root = psutil.Process(pid)
        processes = [root, *(root.children(recursive=True) if part.stop_group else [])]
        if root.status() != psutil.STATUS_STOPPED:
            root.send_signal(signal.Signals[f"SIG{part.stop_signal}"])
            psutil.wait_procs([root], timeout=part.stop_wait_seconds)
    except psutil.NoSuchProcess:
        return
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


async def run_watcher(stack: Stack) -> None:
    """Run the watcher until SIGTERM or SIGINT."""
    stop = stop_event()
    await Watcher(stack).run(stop)
