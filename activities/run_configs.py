"""The resolved config of a run, read once per worker: a run's config never changes.

Why here: every stage needs it, and a query per activity would be one too many.
Called by: the activities.
"""

from ratchet.config import RunConfig
from ratchet.errors import BugError, ConfigError
from ratchet.store import rollouts, runs
from ratchet.store.database import Database
from ratchet.temporal_settings import TemporalSettings

_MAX_ROLLOUTS = 10_000


class RunConfigs:
    def __init__(self, database: Database, settings: TemporalSettings) -> None:
        self.database, self.settings = database, settings
        self._configs: dict[str, RunConfig] = {}
        self._runs: dict[int, str] = {}

    async def of_run(self, run_id: str) -> RunConfig:
        if run_id not in self._configs:
            async with self.database.begin() as connection:
                row = await runs.get_run(connection, run_id)
            if row is None:
                raise BugError(f"run {run_id} has no row")
            self._configs[run_id] = RunConfig.model_validate(row.config)
        return self._configs[run_id]

    async def of_rollout(self, rollout_id: int) -> RunConfig:
        if rollout_id not in self._runs:
            if len(self._runs) >= _MAX_ROLLOUTS:
                self._runs.clear()
            async with self.database.begin() as connection:
                self._runs[rollout_id] = await rollouts.run_of_rollout(connection, rollout_id)
        return await self.of_run(self._runs[rollout_id])

    def ttl_seconds(self, config: RunConfig, max_ttl_seconds: int) -> int:
        """How long a rollout's box lives without being asked for again. Raises ConfigError where the service allows less than a rollout may take."""
        guard = self.guard_seconds(config)
        if max_ttl_seconds < guard:
            raise ConfigError(
                f"a rollout may take {guard:.0f} s (its limits), and boxes of this service live {max_ttl_seconds} s at most"
                " (RATCHET_SANDBOX_MAX_TTL_SECONDS); lower limits.agent_seconds, eval_seconds or guard_seconds"
            )
        return int(min(max_ttl_seconds, guard + self.settings.rollout.ttl_margin))

    def guard_seconds(self, config: RunConfig) -> float:
        limits = config.limits
        return limits.guard_seconds or limits.agent_seconds + limits.eval_seconds + self.settings.rollout.guard_margin
