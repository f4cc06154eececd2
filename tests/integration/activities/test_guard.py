"""The guard on wall time, asked before the watcher has written an outage that is over."""

import dataclasses

import pytest
from temporalio.testing import ActivityEnvironment

from activities import guard
from ratchet.errors import GuardSpentError
from ratchet.payloads import StageInput
from store.database import Database
from tests.integration.store.test_outages import HOUR, away, box, rollout

__all__ = ["rollout"]


async def test_an_outage_that_is_written_late_does_not_count(
    database: Database, rollout: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage of Postgres is written after it; what is exceeded in spite of it ends the rollout."""
    await box(database, rollout, 10, None)
    ended = iter([9.95, 0.5])  # the watcher writes while the guard waits: too little, then enough

    async def watcher_writes(seconds: float) -> None:
        await away(database, "postgres", 10, next(ended))

    monkeypatch.setattr(guard, "sleep", watcher_writes)
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, workflow_id=rollout[1])
    input = StageInput(rollout_id=rollout[0], attempt=1)
    with pytest.raises(GuardSpentError):
        await environment.run(guard.require_wall_time, database, input, HOUR)
    assert 0 < await environment.run(guard.require_wall_time, database, input, HOUR) < HOUR
    with pytest.raises(StopIteration):
        next(ended)
