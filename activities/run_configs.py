"""The resolved configs of runs for the stages of rollouts, read again by each worker process every two seconds.

What decides about a run (TrainRun's activities, the planner) reads the run's row in its own transaction instead.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

from ratchet import secrets
from ratchet.config import RunConfig
from ratchet.errors import FencedError
from ratchet.stored_config import read_stored_config
from ratchet.temporal_settings import TemporalSettings
from store import rollouts, runs
from store.database import Database

_MAX_ROLLOUTS = 10_000
_MAX_AGE_SECONDS = 2.0
"""A change by `ratchet set` reaches the stages of rollouts after this time at the latest."""


class _ReadConfig(NamedTuple):
    """A config and when it was read, by the monotonic clock in seconds."""

    config: RunConfig
    read_at: float


class RunConfigs:
    """Configs by run and by rollout, with the settings of temporal.yaml beside them."""

    def __init__(self, database: Database, settings: TemporalSettings) -> None:
        self.database = database
        self.settings = settings
        self._configs: dict[str, _ReadConfig] = {}
        self._run_of_rollout: dict[int, str] = {}

    async def of_run(self, run_id: str) -> RunConfig:
        """Return the run's config. Raises FencedError if the run has no row: the store was restored."""
        known = self._configs.get(run_id)
        if known is not None and time.monotonic() - known.read_at < _MAX_AGE_SECONDS:
            return known.config
        started = time.monotonic()
        row = await self.database.read(runs.get_run, run_id)
        if row is None:
            raise FencedError(f"run {run_id} has no row")
        config = read_stored_config(row.config)
        secrets.note_values(config.harness.extra_env)
        self._configs[run_id] = _ReadConfig(config, started)
        return config

    async def of_rollout(self, rollout_id: int) -> RunConfig:
        return await self.of_run(await self.run_of_rollout(rollout_id))

    async def run_of_rollout(self, rollout_id: int) -> str:
        if rollout_id not in self._run_of_rollout:
            if len(self._run_of_rollout) >= _MAX_ROLLOUTS:
                self._run_of_rollout.clear()
            self._run_of_rollout[rollout_id] = await self.database.read(rollouts.run_of_rollout, rollout_id)
        return self._run_of_rollout[rollout_id]


@dataclass(eq=False)
class RecordActivities:
    """Base of activities that read and write the store, and use no box."""

    database: Database
    settings: TemporalSettings
    configs: RunConfigs
