"""Ended runs are pruned: every row of their turns is in the archive once, however a prune is interrupted, and nothing
that is still needed is deleted."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import func, insert, select, text, update

from activities import pruning
from activities.pruning import PruneTask
from ratchet.errors import ConfigError, RatchetError
from ratchet.temporal_settings import Retention
from ratchet.token_statistics import TrainedTurn
from stack.train_from_store import create_stored_run
from store import open_runs, retention, runs
from store.arrays import ids_from_bytes, pack_text
from store.database import Database
from store.schema import (
    AttemptTable,
    BatchItemTable,
    CheckpointTable,
    GradeTable,
    PatchTable,
    PolicyVersionTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    TurnTable,
)
from store.token_statistics import record_trained_turns
from tests.integration.training.records import make_config, make_group, make_planned_run, make_run
from training.sample_export import export_run

Rows = dict[str, list[dict[str, Any]]]
CONFIG = make_config(training={"steps": 2})
PRUNE = """
import asyncio, sys
from activities import pruning
from store.database import Database
async def run():
    async with Database(sys.argv[1]) as database:
        await pruning.prune_run(database, pruning.PruneTask(sys.argv[2]))
asyncio.run(run())
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    yield tmp_path


async def make_ended_run(database: Database, run_id: str, model: Path, home: Path, state: str = "done") -> None:
    """A run of two steps whose rollouts have turns, chains, logs and verdicts, ended forty days ago."""
    await make_planned_run(database, run_id, CONFIG, model, home / "policies")
    async with database.begin() as connection:
        of_run = select(RolloutTable.id).where(RolloutTable.run_id == run_id)
        for rollout_id in (await connection.execute(of_run)).scalars().all():
            attempt = {"rollout_id": rollout_id, "n": 1, "transcript": pack_text(f"{rollout_id} ran")}
            await connection.execute(insert(AttemptTable).values(**attempt))
            diff = {"base_commit": "", "diff": b"", "num_bytes": 0, "num_files": 0}
            patch = insert(PatchTable).values(rollout_id=rollout_id, attempt=1, **diff).returning(PatchTable.id)
            grade = {"grader": "g", "grader_version": "1", "solved": True, "duration_seconds": 1.0}
            grade |= {"patch_id": (await connection.execute(patch)).scalar_one(), "tests": {"a": "ä"}}
            await connection.execute(insert(GradeTable).values(rollout_id=rollout_id, log=pack_text("ok"), **grade))
        mine = select(TurnTable.id, TurnTable.rollout_id).where(TurnTable.rollout_id.in_(of_run))
        turns = (await connection.execute(mine)).all()
        halves = np.arange(3, dtype=np.float16)
        seen = [TrainedTurn(turn, rollout, 4, halves, -halves) for turn, rollout in turns]
        await record_trained_turns(connection, run_id, 1, seen)
        ended = text("now() - interval '40 days'")
        await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(state=state, ended_at=ended))


async def stored_rows(database: Database, run_id: str) -> Rows:
    async with database.begin() as connection:
        of_run = select(RolloutTable.id).where(RolloutTable.run_id == run_id)
        ids = list((await connection.execute(of_run)).scalars())
        found = {name: await retention.rows_to_archive(connection, name, ids) for name in retention.ARCHIVED_TABLES}
    return {name: ordered(rows) for name, rows in found.items()}


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row.get("chain_id") or row.get("turn_id") or row["id"], row.get("no") or 0))


def archived_rows(home: Path, run_id: str) -> Rows:
    """The rows of the archive with JSON as in the store; a row that is there twice counts twice."""
    found: Rows = {}
    for name in retention.ARCHIVED_TABLES:
        files = sorted((home / "archive" / run_id / name).glob("*.parquet"))
        found[name] = [row for file in files for row in pq.read_table(file).to_pylist()]
        kinds = {column.name: column.type for column in retention.ARCHIVED_TABLES[name].__table__.columns}
        for row in found[name]:
            row |= {key: json_of(row[key]) for key in row if str(kinds[key]) == "JSONB"}
    return {name: ordered(rows) for name, rows in found.items()}


def json_of(value: str | None) -> Any:
    return None if value is None else json.loads(value)


async def num_stored_turns(database: Database) -> int:
    async with database.begin() as connection:
        return int((await connection.execute(select(func.count()).select_from(TurnTable))).scalar_one())


async def test_every_row_is_in_the_archive_and_no_turn_is_left(
    database: Database, model: Path, home: Path, run_id: str
) -> None:
    await make_ended_run(database, run_id, model, home)
    before = await stored_rows(database, run_id)
    assert all(before.values())
    done = await pruning.prune_run(database, PruneTask(run_id))
    assert done.num_rollouts == len(before["attempt"])
    assert archived_rows(home, run_id) == before
    assert all(len(ids_from_bytes(row["sampled_ids"])) for row in archived_rows(home, run_id)["turn"])
    left = await stored_rows(database, run_id)
    assert [left[name] for name in ("turn", "chain", "chain_span", "trained_turn")] == [[], [], [], []]
    assert {row["transcript"] for row in left["attempt"]} == {None}
    assert {row["log"] for row in left["grade"]} == {pack_text("")}
    assert [row["tests"] for row in left["grade"]] == [row["tests"] for row in before["grade"]]
    assert not [path for path in (home / "archive").rglob("*") if path.suffix == ".partial"]


async def test_a_run_is_archived_in_parts(database: Database, model: Path, home: Path, run_id: str) -> None:
    await make_ended_run(database, run_id, model, home)
    before = await stored_rows(database, run_id)
    async with database.begin() as connection:
        await retention.begin_prune(connection, run_id)
    moved = []
    while (number := await pruning.archive_next_part(database, run_id, part_bytes=1)) is not None:
        moved.append(number)
    assert len(moved) > 1
    assert sum(moved) == len(before["attempt"])
    assert archived_rows(home, run_id) == before


async def test_a_killed_prune_is_begun_again(
    database: Database, model: Path, home: Path, run_id: str, postgres_url: str
) -> None:
    """It is killed after its files have their names, while it drops the rows."""
    await make_ended_run(database, run_id, model, home)
    before = await stored_rows(database, run_id)
    async with database.begin() as holder:
        await holder.execute(select(TurnTable.id).limit(1).with_for_update())
        command = [sys.executable, "-c", PRUNE, postgres_url, run_id]
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "RATCHET_HOME": str(home)})
        async with asyncio.timeout(60), Database(postgres_url, pool_size=1) as other:
            while not await _waits_for_row(other):
                await asyncio.sleep(0.05)
        assert archived_rows(home, run_id) == before
        process.send_signal(signal.SIGKILL)
        await process.wait()
    (home / "archive" / run_id / "turn" / "left.partial").touch()
    await pruning.prune_run(database, PruneTask(run_id))
    assert archived_rows(home, run_id) == before
    assert await num_stored_turns(database) == 0
    assert not list((home / "archive").rglob("*.partial"))


async def _waits_for_row(database: Database) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'DELETE FROM turn%'"
    async with database.begin() as connection:
        return bool((await connection.execute(text(waiting))).scalar_one())


async def test_two_prunes_at_once_archive_each_row_once(
    database: Database, model: Path, home: Path, run_id: str
) -> None:
    await make_ended_run(database, run_id, model, home)
    before = await stored_rows(database, run_id)
    both = (pruning.prune_run(database, PruneTask(run_id)) for _ in range(2))
    results = await asyncio.gather(*both, return_exceptions=True)
    assert all(isinstance(result, pruning.Pruned | RatchetError) for result in results)
    await pruning.prune_run(database, PruneTask(run_id))
    assert archived_rows(home, run_id) == before
    assert await num_stored_turns(database) == 0


async def test_rows_stay_if_the_archive_cannot_be_written(
    database: Database, model: Path, home: Path, run_id: str
) -> None:
    await make_ended_run(database, run_id, model, home)
    before = await num_stored_turns(database)
    (home / "archive").write_text("a file, so that no directory can be made")
    with pytest.raises(OSError, match="archive"):
        await pruning.prune_run(database, PruneTask(run_id))
    assert await num_stored_turns(database) == before
    (home / "archive").unlink()
    await pruning.prune_run(database, PruneTask(run_id))
    assert await num_stored_turns(database) == 0


@pytest.mark.parametrize(
    ("state", "force", "message"),
    [
        ("running", False, "is running and is not pruned; cancel it first"),
        ("paused", True, "is paused and is not pruned"),
        ("failed", False, "can be resumed, which pruning makes impossible; add --force"),
        ("cancelled", False, "can be resumed"),
    ],
)
async def test_runs_that_can_go_on_are_refused(
    database: Database, model: Path, home: Path, run_id: str, state: str, force: bool, message: str
) -> None:
    await make_ended_run(database, run_id, model, home, state)
    before = await num_stored_turns(database)
    for work in (pruning.prune_run, pruning.describe_prune):
        with pytest.raises(ConfigError, match=message):
            await work(database, PruneTask(run_id), force)
    assert await pruning.due_tasks(database, Retention(turns_days=0, weights_days=0)) == []
    assert await num_stored_turns(database) == before


async def test_a_run_with_a_rollout_in_flight_or_a_user_is_refused(
    database: Database, model: Path, home: Path, run_id: str
) -> None:
    await make_ended_run(database, run_id, model, home)
    async with database.begin() as connection:
        one = select(func.max(RolloutTable.id)).scalar_subquery()
        late = update(RolloutTable).where(RolloutTable.id == one)
        await connection.execute(late.values(outcome=None, reward=None))
    with pytest.raises(ConfigError, match="rollouts in flight"):
        await pruning.prune_run(database, PruneTask(run_id))
    async with database.begin() as connection:
        await connection.execute(late.values(outcome="cancelled"))
        await make_run(database, "user", CONFIG)
        group = select(RolloutGroupTable.id).where(RolloutGroupTable.run_id == run_id).limit(1).scalar_subquery()
        used = {"run_id": "user", "group_id": group, "step": 1, "use": "trained"}
        await connection.execute(insert(BatchItemTable).values(**used))
    with pytest.raises(ConfigError, match="run user trains on its stored turns"):
        await pruning.prune_run(database, PruneTask(run_id), force=True)


async def test_a_pruned_run_is_not_resumed_exported_or_trained_on(
    database: Database, model: Path, home: Path, run_id: str
) -> None:
    await make_ended_run(database, run_id, model, home, "cancelled")
    await pruning.prune_run(database, PruneTask(run_id), force=True)
    async with database.begin() as connection:
        with pytest.raises(ConfigError, match=r"was pruned on .* and cannot be resumed"):
            await open_runs.resume_run(connection, run_id)
    async with database.begin() as connection:
        with pytest.raises(ConfigError, match=f"archived: read `archive/{run_id}`"):
            await export_run(connection, run_id, ["jsonl"], home)
    with pytest.raises(ConfigError, match="archived"):
        await create_stored_run(database, "other", run_id, CONFIG.model_copy(update={"init_from": str(model)}), "c")


async def test_the_settings_decide_what_is_due(database: Database, model: Path, home: Path, run_id: str) -> None:
    await make_ended_run(database, run_id, model, home)

    async def due(**days: float | None) -> list[PruneTask]:
        return await pruning.due_tasks(database, Retention(**days))

    assert await due(turns_days=39, weights_days=39) == [PruneTask(run_id)]
    assert await due(turns_days=41, weights_days=None) == []
    assert await due(turns_days=None, weights_days=39) == [PruneTask(run_id, turns=False)]
    await pruning.prune_run(database, PruneTask(run_id), max_seconds=0)
    assert await due(turns_days=None, weights_days=None) == [PruneTask(run_id)], "what was begun is ended"
    await pruning.prune_run(database, PruneTask(run_id))
    assert await due(turns_days=39, weights_days=None) == [PruneTask(run_id, turns=False)]


async def test_needed_weights_stay(database: Database, model: Path, home: Path, run_id: str) -> None:
    """Of six versions and two checkpoints: the newest, the initial weights, and those that another run began with."""
    await make_ended_run(database, run_id, model, home)
    policies, checkpoints = home / "policies" / run_id, home / "checkpoints" / run_id
    async with database.begin() as connection:
        for step in range(1, 6):
            path = policies / f"{step}.e1"
            path.mkdir()
            row = {"run_id": run_id, "step": step, "epoch": 1, "uri": str(path), "files": []}
            await connection.execute(insert(PolicyVersionTable).values(version=f"{run_id}/{step}.e1", **row))
        for step in (2, 4):
            path = checkpoints / f"step{step}.e1"
            path.mkdir(parents=True)
            row = {"run_id": run_id, "step": step, "epoch": 1, "uri": str(path), "world_size": 1, "num_threads": 1}
            await connection.execute(insert(CheckpointTable).values(**row))
        moved = update(RunTable).where(RunTable.run_id == run_id)
        await connection.execute(moved.values(checkpoint_step=4, checkpoint_uri=str(checkpoints / "step4.e1")))
    (policies / "6.e1.building").mkdir()
    await make_run(database, "child", CONFIG, policies / "3.e1")
    task = PruneTask(run_id, turns=False)
    would = await pruning.describe_prune(database, task)
    done = await pruning.prune_run(database, task)
    assert (would, done.num_directories) == (done, 5)
    assert {path.name for path in policies.iterdir()} == {"0.e0", "3.e1", "5.e1"}
    assert [path.name for path in checkpoints.iterdir()] == ["step4.e1"]
    async with database.begin() as connection:
        published = select(PolicyVersionTable.step).where(PolicyVersionTable.state == "published")
        assert sorted((await connection.execute(published)).scalars()) == [0, 3, 5]
    assert (await pruning.prune_run(database, task)).num_directories == 0


async def test_a_run_that_keeps_all_versions_keeps_them(
    database: Database, model: Path, home: Path, run_id: str
) -> None:
    await make_ended_run(database, run_id, model, home)
    keeping = make_config(training={"steps": 2, "kept_versions": None}).model_dump(mode="json")
    async with database.begin() as connection:
        await runs.set_run_config(connection, run_id, keeping)
    assert await pruning.due_tasks(database, Retention(turns_days=None)) == []


async def test_other_runs_are_left_alone(database: Database, model: Path, home: Path, run_id: str) -> None:
    await make_ended_run(database, run_id, model, home)
    await make_run(database, "other", CONFIG, model, home / "policies")
    async with database.begin() as connection:
        await make_group(connection, "other", 7, [0.0, 1.0])
    before = await stored_rows(database, "other")
    for task in await pruning.due_tasks(database, Retention()):
        await pruning.prune_run(database, task)
    assert await stored_rows(database, "other") == before
