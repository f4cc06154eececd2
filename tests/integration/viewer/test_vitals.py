"""The facts at the head of a run's page: each is what the store says, and links to what it counts."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update

from cli.run_screen import lines_of
from reads.runs import require_run
from reads.vitals import Vital, read_vitals
from stack.parts import Stack
from stack.run_status import diagnose
from store.database import Database
from store.open_rollouts import count_open_rollouts
from store.schema import EvaluationTable, RolloutTable
from tests.integration.viewer.filled_store import FilledRun


async def vitals(database: Database, filled: FilledRun) -> dict[str, Vital]:
    async with database.begin() as connection:
        waits = await count_open_rollouts(connection, filled.run_id)
        found = await read_vitals(connection, await require_run(connection, filled.run_id), waits)
    return {one.name: one for one in found}


async def test_the_facts_are_those_of_the_store(filled: FilledRun, database: Database) -> None:
    now = datetime.now(UTC)
    async with database.begin() as connection:
        for rollout_id, minutes in ((filled.solved, 1), (filled.unsolved, 30), (filled.failed, 70)):
            ended = update(RolloutTable).where(RolloutTable.id == rollout_id)
            await connection.execute(ended.values(ended_at=now - timedelta(minutes=minutes)))
        evaluation = update(EvaluationTable).where(EvaluationTable.run_id == filled.run_id)
        await connection.execute(evaluation.values(ended_at=now))
    found = await vitals(database, filled)
    assert found["step"].value == "3 of 6"
    assert found["rollouts a minute"].value == "0.1"
    assert (found["without verdict"].value, found["without verdict"].detail) == (
        "0",
        "in the last hour, 1 in the hour before",
    )
    assert found["open rollouts"].detail.startswith("1 agent works, for up to ")
    assert found["training reward"].value == "0.25" and found["staleness"].value == "1.5"
    assert found["held-out solve rate"].detail.startswith("at step 0, 1 tasks")


async def test_each_fact_leads_to_a_page(client: httpx.AsyncClient, filled: FilledRun, database: Database) -> None:
    for one in (await vitals(database, filled)).values():
        assert (await client.get(one.page)).status_code == 200, one


async def test_page_and_commands_say_the_same(
    client: httpx.AsyncClient,
    filled: FilledRun,
    database: Database,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    page = (await client.get(f"/runs/{filled.run_id}.json")).json()["vitals"]
    found = await diagnose(Stack(tmp_path), filled.run_id)
    assert [one.name for one in found.vitals] == [one["name"] for one in page]
    said = "\n".join(lines_of(found))
    assert all(f"{one.name}: {one.value}" in said for one in found.vitals)
