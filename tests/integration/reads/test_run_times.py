"""The times of a run that is in the store are those of the simulation that wrote it."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import insert, update

from ratchet.types import GroupState, Purpose, SandboxRole, policy_version
from reads.curves import times_by_step
from reads.run_result import read_steps
from reads.run_times import RunTimes, read_run_times
from reads.step_rows import read_step_head
from store import metrics
from store.database import Database
from store.schema import (
    BatchItemTable,
    BatchTable,
    EvaluationTable,
    PolicyVersionTable,
    RolloutGroupTable,
    RolloutTable,
    SandboxTable,
    SessionTable,
    TaskTable,
    TurnTable,
)
from tests.integration.training.records import make_config, make_run
from tests.standins.pipeline import MADE, Pipeline, simulate


def at(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def members(step: int, times: RunTimes) -> list[dict[str, Any]]:
    trained = {one.group_id for one in times.groups if one.step == step and one.use == "trained"}
    return [
        {"rollout_id": one.rollout_id, "num_tokens": one.num_trained}
        for one in times.rollouts
        if one.group_id in trained
    ]


async def write(database: Database, run_id: str, times: RunTimes) -> None:
    """Write the rows of the ledger."""
    await make_run(database, run_id, make_config())
    task = {"dataset": "d", "dataset_digest": run_id, "row_digest": "r", "row_no": 0, "label": "t", "image": "host"}
    purpose = {"run_id": run_id, "task_id": 1, "purpose": Purpose.TRAIN, "temperature": 1.0}
    rows: dict[Any, list[dict[str, Any]]] = {
        TaskTable: [task | {"id": 1, "workdir": "/w", "grader": "g", "spec": {}}],
        BatchTable: [
            {"run_id": run_id, "step": one.step, "state": "committed", "planned_at": at(one.planned)}
            | {
                "stepped_at": at(one.stepped),
                "members": members(one.step, times),
                "denominators": [],
                "knobs": {},
                "seed": 0,
            }
            for one in times.steps
        ],
        RolloutGroupTable: [
            purpose
            | {
                "id": one.group_id,
                "group_no": one.group_id,
                "size": 4,
                "min_graded": 2,
                "workflow_id": f"g{one.group_id}",
            }
            | {"state": GroupState.FAILED if one.use == "failed" else "consumed"}
            | {"created_at": at(one.created), "ready_at": at(one.ready)}
            for one in times.groups
        ],
        BatchItemTable: [
            {"run_id": run_id, "group_id": one.group_id, "step": one.step, "use": one.use}
            for one in times.groups
            if one.step is not None
        ],
        RolloutTable: [
            purpose
            | {"id": one.rollout_id, "group_id": one.group_id, "member": one.rollout_id, "harness": "h"}
            | {"workflow_id": f"r{one.rollout_id}", "outcome": "graded", "reward": 1.0, "created_at": at(one.created)}
            | {
                "ended_at": at(one.ended),
                "timings": {"agent": one.agent_seconds},
                "num_trained_tokens": one.num_trained + 7,  # a config may train only a part of them
            }
            for one in times.rollouts
        ],
        SandboxTable: [
            {"provider": "p", "rollout_id": one.rollout_id, "attempt": 1, "workflow_id": "w", "image": "i"}
            | {"role": SandboxRole.GRADE if box.is_grading else SandboxRole.AGENT, "state": "released"}
            | {"created_at": at(box.granted), "live_at": at(box.live), "released_at": at(box.released)}
            for one in times.rollouts
            for box in one.boxes
        ],
        SessionTable: [
            {"id": one.rollout_id, "rollout_id": one.rollout_id, "attempt": 1, "temperature": 1.0, "model": "m"}
            | {"limits": {}}
            for one in times.rollouts
        ],
        TurnTable: [
            {"session_id": one.rollout_id, "rollout_id": one.rollout_id, "attempt": 1, "digest": b"d", "dialect": "c"}
            | {"prompt_tokens": 1, "suffix_ids": b"", "temperature": 1.0, "request": b"", "state": "completed"}
            | {"worker": "gone"}
            | {"num_sampled": one.num_sampled, "engine_wait_seconds": one.wait_seconds}
            | {"created_at": at(MADE), "completed_at": at(MADE + one.call_seconds)}
            for one in times.rollouts
        ],
        EvaluationTable: [
            {"run_id": run_id, "label": str(number), "step": 0, "temperature": 1.0, "num_samples": 1}
            | {"policy_version": "v", "created_at": at(one.start), "ended_at": at(one.end)}
            for number, one in enumerate(times.evaluations)
        ],
    }
    async with database.begin() as connection:
        for table, values in rows.items():
            if values:
                await connection.execute(insert(table).values(values))
        for step in times.steps:
            await metrics.record_metrics(connection, run_id, step.step, {"sync_seconds": step.sync_seconds})


async def test_the_ledger_has_the_times(database: Database, run_id: str) -> None:
    settings = Pipeline(no_engine=2.0, staleness=1, evaluation=20.0, useless=2, steps=4)
    times = simulate(settings)
    await write(database, run_id, times)
    async with database.begin() as connection:
        found = await read_run_times(connection, run_id, 100)
        newest = await read_run_times(connection, run_id, 2)
    assert found.steps == times.steps and found.evaluations == times.evaluations
    expected = [one for one in times.groups if one.step is not None and one.step <= settings.steps]
    assert found.groups == sorted(expected, key=lambda one: one.group_id)
    uses = {one.group_id: one.use for one in expected}
    assert found.rollouts == [
        one if uses[one.group_id] == "trained" else replace(one, num_trained=0)
        for one in times.rollouts
        if one.group_id in uses
    ]
    assert [one.step for one in newest.steps] == [3, 4] and {one.step for one in newest.groups} <= {3, 4}
    assert found.began is None and newest.began == times.steps[1].stepped + times.steps[1].sync_seconds


async def test_a_step_that_a_new_learner_has_trained_again_keeps_its_time(database: Database, run_id: str) -> None:
    times = simulate(Pipeline(steps=3))
    await write(database, run_id, times)
    async with database.begin() as connection:
        for epoch, seconds in ((1, 0.0), (3, 500.0)):
            version = {"version": policy_version(run_id, 2, epoch), "run_id": run_id, "step": 2, "epoch": epoch}
            published = at(times.steps[1].stepped + seconds)
            await connection.execute(
                insert(PolicyVersionTable).values(**version, uri="", files=[], created_at=published)
            )
        again = update(BatchTable).where(BatchTable.run_id == run_id, BatchTable.step == 2)
        await connection.execute(again.values(stepped_at=at(times.steps[1].stepped + 500.0)))
        assert (await read_run_times(connection, run_id, 10)).steps == times.steps
        first = at(times.steps[1].stepped)
        head = await read_step_head(connection, run_id, 2)
        assert head is not None and head.stepped_at == first
        assert (await times_by_step(connection, run_id, 2, 2))[2].stepped_at == first
        assert [row["stepped_at"] for row in await read_steps(connection, run_id)][1] == first
        await connection.execute(again.values(stepped_at=None))
        assert (await times_by_step(connection, run_id, 2, 2))[2].stepped_at is None, "it is published, not trained"


@pytest.mark.parametrize("steps", [0, 3])
async def test_a_run_without_steps_has_no_times(database: Database, run_id: str, steps: int) -> None:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        found = await read_run_times(connection, run_id, steps or 1)
    assert (found.steps, found.groups, found.rollouts) == ([], [], [])


async def test_another_run_that_trained_on_the_same_groups_changes_nothing(database: Database, run_id: str) -> None:
    times = simulate(Pipeline(useless=2, steps=3))
    await write(database, run_id, times)
    await make_run(database, run_id + "-again", make_config())
    async with database.begin() as connection:
        before = await read_run_times(connection, run_id, 10)
        shared = [
            {"run_id": run_id + "-again", "group_id": one.group_id, "step": 40 + number, "use": "trained"}
            for number, one in enumerate(times.groups)
        ]
        await connection.execute(insert(BatchItemTable).values(shared))
        assert await read_run_times(connection, run_id, 10) == before
