"""The lateness of a worker process: by how many seconds its work begins after it could.

It is measured twice, because each kind of overload shows in only one of them: the time from the end of a rollout's
stage to the start of its next one shows that Temporal or its database is late; a sleep that ends late shows that this
process is.
"""

import asyncio
import time
from collections import deque

_WINDOW_SECONDS = 30.0
_MOST_VALUES = 1000
_MOST_WORKFLOWS = 10_000
_NAP_SECONDS = 1.0


class WorkerLateness:
    """The values of the last half minute."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=_MOST_VALUES)
        self._ended: dict[str, tuple[int, float]] = {}

    def stage_ended(self, workflow_id: str, number: int) -> None:
        """Note the end of a stage whose workflow begins the next one at once. `number`: of the workflow's activity."""
        if len(self._ended) >= _MOST_WORKFLOWS:  # their next stages began elsewhere
            self._ended.clear()
        self._ended[workflow_id] = (number, time.monotonic())

    def stage_began(self, workflow_id: str, number: int, waits_for_slot: bool) -> None:
        """Note the start of a stage. Time in the queue is no lateness, nor that of another worker's stages between."""
        before, ended = self._ended.pop(workflow_id, (0, 0.0))
        if before and before == number - 1 and not waits_for_slot:
            self._add(time.monotonic() - ended)

    async def follow(self) -> None:
        """Note once a second by how much a sleep of a second was longer."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_NAP_SECONDS)
            self._add(time.monotonic() - before - _NAP_SECONDS)

    def _add(self, seconds: float) -> None:
        self._values.append((time.monotonic(), seconds))

    def seconds(self) -> float:
        """Return the third quartile: a few late values are no overload."""
        oldest = time.monotonic() - _WINDOW_SECONDS
        recent = sorted(seconds for at, seconds in self._values if at >= oldest)
        return recent[len(recent) * 3 // 4] if recent else 0.0
