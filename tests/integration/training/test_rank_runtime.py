"""The heartbeats of a learner go on while its process lives."""

import asyncio
from pathlib import Path

import pytest

from store import learners
from store.database import Database
from store.learner_commits import RunLease
from tests.integration.training.records import make_config, make_run
from tests.standins.failing_database import FailingDatabase
from training import rank_runtime
from training.rank_runtime import HeartbeatThread, RankSettings


class _OnceFailingDatabase(FailingDatabase):
    num_failures = 2


async def test_heartbeats_go_on_after_any_error(
    postgres_url: str, database: Database, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ended before, and another learner took over from one that was at work."""
    await make_run(database, run_id, make_config())
    monkeypatch.setattr(rank_runtime, "Database", _OnceFailingDatabase)
    monkeypatch.setattr(rank_runtime, "_HEARTBEAT_SECONDS", 0.05)
    settings = RankSettings(run_id, postgres_url, Path("/unused"), Path("/unused"))
    with HeartbeatThread(settings, RunLease(run_id, 0, 0, None), 1).running(True):
        async with asyncio.timeout(60):
            while await _no_heartbeat(database, run_id):
                await asyncio.sleep(0.05)


async def _no_heartbeat(database: Database, run_id: str) -> bool:
    async with database.begin() as connection:
        return await learners.get_learner(connection, run_id) is None
