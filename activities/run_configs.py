"""The resolved configs of runs, read once per worker process, because a run's config never changes."""

from ratchet import secrets
from ratchet.config import RunConfig
from ratchet.errors import BugError
from ratchet.store import rollouts, runs
from ratchet.store.database import Database
from ratchet.stored_config import read_stored_config
from ratchet.temporal_settings import TemporalSettings

_MAX_ROLLOUTS = 10_000


class RunConfigs:
    """Configs by run and by rollout, with the settings of temporal.yaml beside them."""

    def __init__(self, database: Database, settings: TemporalSettings) -> None:
        self.database = database
        self.settings = settings
        self._configs: dict[str, RunConfig] = {}
        self._run_of_rollout: dict[int, str] = {}

    async def of_run(self, run_id: str) -> RunConfig:
        """Return the run's config. Raises BugError if the run has no row."""
        if run_id not in self._configs:
            async with self.database.begin() as connection:
                row = await runs.get_run(connection, run_id)
            if row is None:
                raise BugError(f"run {run_id} has no row")
            config = read_stored_config(row.config)
            secrets.note_values(config.harness.extra_env)
            self._configs[run_id] = config
        return self._configs[run_id]

    async def of_rollout(self, rollout_id: int) -> RunConfig:
        """Return the config of the rollout's run."""
        if rollout_id not in self._run_of_rollout:
            if len(self._run_of_rollout) >= _MAX_ROLLOUTS:
                self._run_of_rollout.clear()
            async with self.database.begin() as connection:
                self._run_of_rollout[rollout_id] = await rollouts.run_of_rollout(connection, rollout_id)
        return await self.of_run(self._run_of_rollout[rollout_id])
