"""The progress of a run that a waiting command shows."""

from pathlib import Path

from sqlalchemy import func, update

from reads.evaluations import evaluation_rates
from reads.run_result import run_progress
from store.database import Database
from store.schema import EvaluationTable
from tests.integration.viewer.filled_store import fill_run


async def test_an_evaluation_has_a_rate_once_it_has_ended(database: Database, run_id: str, model: Path) -> None:
    await fill_run(database, run_id, model)
    async with database.begin() as connection:
        before = await run_progress(connection, run_id, await evaluation_rates(connection, run_id))
        await connection.execute(update(EvaluationTable).values(ended_at=func.now()))
        after = await run_progress(connection, run_id, await evaluation_rates(connection, run_id))
    assert (before["evaluations"], after["evaluations"]) == ({}, {"start-greedy": 1.0})
    assert after["failed"] == 1 and after["groups_without_signal"] == 1
