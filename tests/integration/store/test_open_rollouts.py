"""The time for which an open rollout has been in its stage, by what has happened to its boxes."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, update

from store.database import Database
from store.open_rollouts import list_slowest
from store.schema import PatchTable, RolloutTable, SandboxTable
from tests.integration.viewer.filled_store import fill_run

# Seconds before now.
RELEASED = {"state": "released", "created_at": 90, "live_at": 80, "released_at": 20}
GRADE = {"role": "grade", "created_at": 15}


@pytest.mark.parametrize(
    ("boxes", "stage", "seconds"),
    [
        ([], "waits for a box", 100),
        ([{"state": "creating", "created_at": 90}], "box boots", 90),
        ([{"state": "live", "created_at": 90, "live_at": 80}], "agent works", 80),
        ([RELEASED | {"state": "release_wanted"}], "ends", 20),
        ([RELEASED], "waits for a grading box", 20),
        ([RELEASED, GRADE | {"state": "creating"}], "box boots", 15),
        ([RELEASED, GRADE | {"state": "live", "live_at": 10}], "is graded", 10),
    ],
)
async def test_the_seconds_are_those_of_the_stage(
    database: Database, run_id: str, model: Path, boxes: list[dict[str, Any]], stage: str, seconds: int
) -> None:
    def ago(seconds: int) -> datetime:
        return now - timedelta(seconds=seconds)

    running = (await fill_run(database, run_id, model)).running
    now = datetime.now(UTC)
    box = {"provider": "e2b", "role": "agent", "rollout_id": running, "attempt": 1, "workflow_id": "w", "image": "host"}
    async with database.begin() as connection:
        rollout = update(RolloutTable).where(RolloutTable.id == running)
        await connection.execute(rollout.values(created_at=ago(110), claimed_at=ago(100)))
        await connection.exec_driver_sql(f"UPDATE attempt SET sandbox_id = NULL WHERE rollout_id = {running}")
        await connection.exec_driver_sql(f"DELETE FROM sandbox WHERE rollout_id = {running}")
        for values in boxes:
            times = {name: ago(one) for name, one in values.items() if isinstance(one, int)}
            await connection.execute(insert(SandboxTable).values(**box | values | times))
        if boxes and boxes[0]["state"] == "released":
            patch = {"rollout_id": running, "attempt": 1, "base_commit": "c0ffee", "diff": b""}
            await connection.execute(insert(PatchTable).values(**patch, num_bytes=0, num_files=0))
        (found,) = await list_slowest(connection, run_id, 9)
    assert found.stage == stage and seconds <= found.seconds < seconds + 60
