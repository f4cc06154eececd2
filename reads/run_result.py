"""The progress and the result of a run, as JSON objects: what `ratchet train` prints while it waits and at the end."""

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.bounded_numbers import LARGEST_INTEGER
from ratchet.types import FAILED_OUTCOMES, JsonObject, Purpose
from reads.curves import newest_rewards, rewards_by_step
from reads.evaluations import EvaluationRate
from store import plans
from store.columns import count_rows
from store.schema import (
    BatchItemTable,
    BatchTable,
    EvaluationTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    TaskTable,
)


async def read_steps(connection: AsyncConnection, run_id: str) -> list[JsonObject]:
    """Return the run's curve, one row per planned step; `stepped_at`: when it was first trained. `reward`: the training
    reward, as `rewards_by_step` has it."""
    statement = select(
        BatchTable.step,
        BatchTable.state,
        BatchTable.epoch,
        BatchTable.metrics,
        BatchTable.planned_at,
        plans.first_trained_at().label("stepped_at"),
    ).where(BatchTable.run_id == run_id)
    rewards = {one.step: one.mean for one in await rewards_by_step(connection, run_id, 1, LARGEST_INTEGER)}
    rows = await connection.execute(statement.order_by(BatchTable.step))
    return [{**row._mapping, "reward": rewards.get(row.step)} for row in rows]


async def evaluation_rewards(connection: AsyncConnection, run_id: str) -> list[JsonObject]:
    """Return one row per graded rollout of each evaluation: label, temperature, step, task, dataset, family, reward."""
    statement = (
        select(
            RolloutGroupTable.label,
            EvaluationTable.temperature,
            EvaluationTable.step,
            TaskTable.row_digest.label("task"),
            TaskTable.dataset,
            TaskTable.spec["family"].astext.label("family"),
            RolloutTable.reward,
        )
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .join(
            EvaluationTable,
            (EvaluationTable.run_id == RolloutGroupTable.run_id) & (EvaluationTable.label == RolloutGroupTable.label),
        )
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .where(
            RolloutTable.run_id == run_id,
            RolloutGroupTable.purpose == Purpose.EVAL,
            RolloutTable.reward.is_not(None),
            RolloutTable.replaced_by.is_(None),
        )
        .order_by(RolloutGroupTable.label, TaskTable.row_no, RolloutTable.member)
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def run_progress(connection: AsyncConnection, run_id: str, rates: Sequence[EvaluationRate]) -> JsonObject:
    """Return what `ratchet train` shows while it waits. `reward`: training reward of the newest trained step.
    `evaluations`: mean of the tasks' mean rewards, of each evaluation that has ended, by its label."""
    of_run = select(RunTable.state, RunTable.state_reason.label("reason"), RunTable.step)
    run = (await connection.execute(of_run.where(RunTable.run_id == run_id))).one()
    of_rollouts = select(
        func.count().label("rollouts"),
        func.count(RolloutTable.outcome).label("ended"),
        func.count(RolloutTable.reward).label("graded"),
        func.count().filter(RolloutTable.outcome.in_(FAILED_OUTCOMES)).label("failed"),
    )
    counts = (await connection.execute(of_rollouts.where(RolloutTable.run_id == run_id))).one()
    reward = (await newest_rewards(connection, [run_id])).get(run_id)
    without_signal = (BatchItemTable.run_id == run_id, BatchItemTable.use != "trained")
    return {
        **run._mapping,
        **counts._mapping,
        "reward": None if reward is None else reward.mean,
        "evaluations": {one.label: one.mean for one in rates if one.ended_at},
        "groups_without_signal": await count_rows(connection, *without_signal),
    }
