"""The progress and the result of a run, as JSON objects: what `ratchet train` prints while it waits and at the end."""

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import FAILED_OUTCOMES, JsonObject, Purpose
from reads.evaluations import evaluation_rates
from store import plans
from store.columns import count_rows
from store.schema import (
    BatchItemTable,
    BatchTable,
    EvaluationTable,
    MetricTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    TaskTable,
)


async def read_steps(connection: AsyncConnection, run_id: str) -> list[JsonObject]:
    """Return the run's curve, one row per planned step; `stepped_at`: when it was first trained."""
    statement = select(
        BatchTable.step,
        BatchTable.state,
        BatchTable.epoch,
        BatchTable.metrics,
        BatchTable.planned_at,
        plans.first_trained_at().label("stepped_at"),
    ).where(BatchTable.run_id == run_id)
    return [dict(row._mapping) for row in await connection.execute(statement.order_by(BatchTable.step))]


async def evaluation_rewards(connection: AsyncConnection, run_id: str) -> list[JsonObject]:
    """Return one row per graded rollout of every evaluation: label, temperature, step, task and its dataset and family,
    reward.
    """
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


async def run_progress(connection: AsyncConnection, run_id: str) -> JsonObject:
    """Return what `ratchet train` shows while it waits. `reward`: mean of the newest trained step's rollouts.
    `evaluations`: mean of the tasks' mean rewards, of each evaluation that has ended, by its label.
    """
    of_run = select(RunTable.state, RunTable.state_reason.label("reason"), RunTable.step)
    run = (await connection.execute(of_run.where(RunTable.run_id == run_id))).one()
    of_rollouts = select(
        func.count().label("rollouts"),
        func.count(RolloutTable.outcome).label("ended"),
        func.count(RolloutTable.reward).label("graded"),
        func.count().filter(RolloutTable.outcome.in_(FAILED_OUTCOMES)).label("failed"),
    )
    counts = (await connection.execute(of_rollouts.where(RolloutTable.run_id == run_id))).one()
    rewards = select(MetricTable.value).where(MetricTable.run_id == run_id, MetricTable.name == "reward_mean")
    without_signal = (BatchItemTable.run_id == run_id, BatchItemTable.use != "trained")
    return {
        **run._mapping,
        **counts._mapping,
        "reward": (await connection.execute(rewards.order_by(MetricTable.step.desc()).limit(1))).scalar_one_or_none(),
        "evaluations": {one.label: one.mean for one in await evaluation_rates(connection, run_id) if one.ended_at},
        "groups_without_signal": await count_rows(connection, *without_signal),
    }
