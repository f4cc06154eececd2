"""Record in Postgres when parts that rollouts need did not answer, so that no time limit of a rollout counts it.

An outage begins at the last answer before it and ends at the first one after it. It is written every few seconds while
it lasts. While Postgres itself is away, its outage is kept here and written afterwards. The last answers are in the
file of `stack/part_health.py`: if the watcher, or everything, is killed, the next watcher finds the same beginning.
Engines are not recorded, because adapters count the time for which a session waits for one.

Time in which the watcher itself did not run, for example because the machine was suspended, is an outage of the part
`watcher`: what worked then is not known, so no limit counts it.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from stack.part_health import HealthState, PartHealth
from stack.parts import Stack
from stack.placement import part_kind
from store import outages
from store.outages import Outage

NEEDED_BY_ROLLOUTS = ("postgres", "temporal", "gateway", "adapter", "egress", "worker")


class OutageLog:
    """The outages that were observed and are not written yet, by part and beginning."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._seen: dict[str, Outage] = {}
        self._unwritten: dict[tuple[str, datetime], Outage] = {}
        self._wanted_at = 0.0

    def see(self, health: Mapping[str, PartHealth], now: float) -> None:
        """Take in the state of all parts, in seconds since the epoch."""
        for name, part in health.items():
            if part_kind(name) not in NEEDED_BY_ROLLOUTS:
                continue
            if part.state is not HealthState.ANSWERING and part.last_answer_at:
                self._extend(name, part.last_answer_at, now)
            elif name in self._seen:  # `since`: its first answer
                self._extend(name, self._seen[name].began_at.timestamp(), part.since)
                del self._seen[name]

    def _extend(self, name: str, began_at: float, ended_at: float) -> None:
        self._seen[name] = self.note(name, began_at, max(began_at, ended_at))  # the clock may have been set back

    def note(self, name: str, began_at: float, ended_at: float) -> Outage:
        """Take in an outage of a part, in seconds since the epoch."""
        outage = Outage(name, datetime.fromtimestamp(began_at, UTC), datetime.fromtimestamp(ended_at, UTC))
        self._unwritten[name, outage.began_at] = outage
        return outage

    @property
    def is_due(self) -> bool:
        return bool(self._unwritten) and time.monotonic() - self._wanted_at >= outages.RECORD_SECONDS

    async def write(self) -> None:
        """Write what was seen. Raises StoreUnavailableError, after which the next call writes it."""
        self._wanted_at = time.monotonic()
        written = dict(self._unwritten)
        async with self._stack.database() as database, database.begin() as connection:
            await outages.record_outages(connection, list(written.values()))
        for key, outage in written.items():
            if self._unwritten.get(key) == outage:
                del self._unwritten[key]
