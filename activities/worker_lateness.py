"""The lateness of a worker process: by how many seconds its work begins after it could.

It is measured twice, because each kind of overload shows in only one of them: Temporal's times of an activity whose
queue has free slots show that the server or its database is late; a sleep that ends late shows that this process is.
"""

import asyncio
import time
from collections import deque
from datetime import UTC, datetime

from temporalio import activity

_WINDOW_SECONDS = 30.0
_MOST_VALUES = 1000
_NAP_SECONDS = 1.0


class WorkerLateness:
    """The values of the last half minute."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=_MOST_VALUES)
        self._born = datetime.now(UTC)

    def see(self, info: activity.Info) -> None:
        """Note how long an activity was queued. Call it at the start of one that never waits for a slot.

        Work that is older than this process had to wait for it.
        """
        if info.current_attempt_scheduled_time > self._born:
            self.add((info.started_time - info.current_attempt_scheduled_time).total_seconds())

    async def follow(self) -> None:
        """Note once a second by how much a sleep of a second was longer."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_NAP_SECONDS)
            self.add(time.monotonic() - before - _NAP_SECONDS)

    def add(self, seconds: float) -> None:
        self._values.append((time.monotonic(), seconds))

    def seconds(self) -> float:
        """Return the 90th percentile: a single late value is no overload."""
        oldest = time.monotonic() - _WINDOW_SECONDS
        recent = sorted(seconds for at, seconds in self._values if at >= oldest)
        return recent[len(recent) * 9 // 10] if recent else 0.0
