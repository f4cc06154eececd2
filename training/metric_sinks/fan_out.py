"""Feeds the sinks of a run without ever waiting for one: each has a thread and a bounded queue.

A sink that raises loses the point that it was writing; one that hangs loses what no longer fits into its queue; one
whose disk is almost full loses what it would have written. Lost points are counted, and the next step records them.
"""

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from ratchet import secrets
from ratchet.config import MetricSinkConfig
from ratchet.disk_space import free_space
from training.metric_sinks.registry import load_sink
from training.metric_sinks.sink import MetricSink, SinkRun

_LOG = structlog.get_logger()
MAX_QUEUED = 1000
"""Points that wait for a sink. One is written per step, so a sink may be away for hours."""
CLOSE_SECONDS = 10.0
"""The time for which the end of the learner waits for all sinks together."""
_MIN_FREE_SHARE = 0.02
"""Below this share of its disk a sink writes nothing; the run is paused then, and needs the rest for checkpoints."""
LOST = "sink_lost_"
"""Prefix of the metric that counts a sink's lost points."""


@dataclass(slots=True, frozen=True)
class MetricPoint:
    """The metrics of a step that were written at once."""

    step: int
    metrics: Mapping[str, float]


class SinkThread:
    """One sink in a thread. `make` is called in it, because a client's import and its log-in may take minutes."""

    def __init__(
        self,
        name: str,
        make: Callable[[], MetricSink],
        has_space: Callable[[], bool] = lambda: True,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self.name = name
        self._make = make
        self._has_space = has_space
        self._queue: queue.Queue[MetricPoint | None] = queue.Queue(max_queued)
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._lost = 0
        self._has_point = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def put(self, point: MetricPoint) -> None:
        """Hand a point over; it is lost if the queue is full. Returns at once."""
        try:
            self._queue.put_nowait(point)
        except queue.Full:
            self._lose("the sink is slow or hangs, and its queue is full")

    def take_lost(self) -> int:
        with self._lock:
            lost = self._lost
            self._lost = 0
        return lost

    def end(self) -> None:
        """Let the thread end when its queue is empty."""
        self._ending.set()
        with contextlib.suppress(queue.Full):  # it looks at `_ending` after each point
            self._queue.put_nowait(None)

    def join(self, seconds: float) -> bool:
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def abandon(self) -> int:
        """Take back what is queued; count it, and the point being written, as lost. Return their number."""
        number = int(self._has_point)
        with contextlib.suppress(queue.Empty):
            while True:
                number += self._queue.get_nowait() is not None
        if number:
            self._lose("the learner ends before the sink has written them", number)
        return number

    def _lose(self, reason: str, number: int = 1) -> None:
        with self._lock:
            self._lost += number
            is_first = not self._is_failing
            self._is_failing = True
        if is_first:
            reason = secrets.without_secrets(reason)[:500]
            _LOG.warning("metric sink loses points", sink=self.name, reason=reason)

    def _run(self) -> None:
        sink: MetricSink | None = None
        while not (self._ending.is_set() and self._queue.empty()):
            point = self._queue.get()
            if point is None:
                continue
            self._has_point = True
            try:
                if not self._has_space():
                    raise OSError(f"under {_MIN_FREE_SHARE:.0%} of the disk is free")
                if sink is None:  # a sink of the user's may be false, such as an empty collection
                    sink = self._make()
                sink.write(point.step, point.metrics)
            except BaseException as error:  # a client may also exit
                self._lose(f"{type(error).__name__}: {error}")
            else:
                with self._lock:
                    self._is_failing = False
            self._has_point = False
        try:
            if sink is not None:
                sink.close()
        except BaseException as error:
            reason = secrets.without_secrets(f"{type(error).__name__}: {error}")[:500]
            _LOG.warning("metric sink not closed", sink=self.name, reason=reason)


class MetricSinks:
    """All sinks of a run; none before `open` is called."""

    def __init__(self, threads: Sequence[SinkThread] = ()) -> None:
        self._threads = list(threads)

    def open(self, wanted: Sequence[MetricSinkConfig], run: SinkRun) -> None:
        """Start a thread for each sink; each gets a directory of its own below that of `run`.

        The second sink of one name is `NAME_2`."""
        numbers: Counter[str] = Counter()
        for one in wanted:
            name = one.name.rpartition(":")[2].lower()
            numbers[name] += 1
            if numbers[name] > 1:
                name = f"{name}_{numbers[name]}"
            self._threads.append(_start_sink(name, one, replace(run, directory=run.directory / name)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics of a step to every sink; returns at once."""
        point = MetricPoint(step, dict(metrics))
        for thread in self._threads:
            thread.put(point)

    def lost_metrics(self) -> dict[str, float]:
        """Return the number of points that each sink has lost since the last call, for those that lost some."""
        lost: dict[str, float] = {}
        for thread in self._threads:
            if number := thread.take_lost():
                lost[f"{LOST}{thread.name}"] = lost.get(f"{LOST}{thread.name}", 0.0) + number
        return lost

    def close(self, seconds: float = CLOSE_SECONDS) -> dict[str, float]:
        """Let the sinks write what is queued, for at most `seconds` together; what is left then is lost. Return what
        `lost_metrics` returns."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            if not thread.join(deadline - time.monotonic()):
                lost_points = thread.abandon()
                _LOG.warning("metric sink did not end", sink=thread.name, lost_points=lost_points)
        lost = self.lost_metrics()
        self._threads = []
        return lost


def _start_sink(name: str, wanted: MetricSinkConfig, run: SinkRun) -> SinkThread:
    def make() -> MetricSink:
        options = secrets.resolve_references(f"metrics.sinks: {wanted.name}: options", wanted.options)
        return load_sink(wanted.name)(run, options)

    return SinkThread(name, make, lambda: free_space(run.directory).share >= _MIN_FREE_SHARE)
