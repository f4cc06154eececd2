"""Evaluations: the held-out tasks under one policy version at one temperature, and their solve rates."""

from dataclasses import asdict, dataclass

from sqlalchemy import ColumnElement, and_, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.payloads import StartedMember
from ratchet.store import groups
from ratchet.store.schema import EvaluationTable, RolloutGroupTable, RolloutTable, TaskTable
from ratchet.types import JsonObject, Outcome, Purpose


@dataclass(slots=True, frozen=True)
class NewEvaluation:
    """The row of an evaluation; `num_samples` rollouts of each held-out task."""

    run_id: str
    label: str
    step: int
    temperature: float
    num_samples: int
    policy_version: str


@dataclass(slots=True, frozen=True)
class SolveRate:
    """Result of an evaluation. `mean_reward` is None if no rollout has a reward."""

    num_rollouts: int
    num_graded: int
    mean_reward: float | None


async def begin_evaluation(connection: AsyncConnection, new: NewEvaluation) -> bool:
    """Insert the evaluation's row; return False if it exists already."""
    statement = insert(EvaluationTable).values(**asdict(new)).on_conflict_do_nothing()
    return (await connection.execute(statement)).rowcount == 1


async def end_evaluation(connection: AsyncConnection, run_id: str, label: str) -> None:
    """Mark the evaluation as ended, and as cancelled its rollouts that no workflow has begun."""
    statement = update(EvaluationTable).where(
        EvaluationTable.run_id == run_id, EvaluationTable.label == label, EvaluationTable.ended_at.is_(None)
    )
    await connection.execute(statement.values(ended_at=func.now()))
    groups_of_it = select(RolloutGroupTable.id).where(_groups_of(run_id, label))
    unclaimed = update(RolloutTable).where(
        RolloutTable.group_id.in_(groups_of_it), RolloutTable.owner.is_(None), RolloutTable.outcome.is_(None)
    )
    ended = {"outcome": Outcome.CANCELLED, "outcome_reason": "its evaluation was cancelled", "ended_at": func.now()}
    await connection.execute(unclaimed.values(**ended))


async def evaluation_steps(connection: AsyncConnection, run_id: str) -> dict[str, int]:
    """Return the step of each evaluation of the run that has begun."""
    statement = select(EvaluationTable.label, EvaluationTable.step).where(EvaluationTable.run_id == run_id)
    return {label: step for label, step in await connection.execute(statement)}


async def list_evaluations(connection: AsyncConnection, run_id: str) -> list[JsonObject]:
    """Return the run's evaluations with their counts and mean reward, oldest first."""
    statement = (
        select(
            EvaluationTable.label,
            EvaluationTable.step,
            EvaluationTable.temperature,
            EvaluationTable.num_samples,
            EvaluationTable.policy_version,
            EvaluationTable.created_at,
            EvaluationTable.ended_at,
            func.count(RolloutTable.id).label("rollouts"),
            func.count(RolloutTable.reward).label("graded"),
            func.avg(RolloutTable.reward).label("mean_reward"),
        )
        .outerjoin(
            RolloutGroupTable,
            and_(
                RolloutGroupTable.run_id == EvaluationTable.run_id,
                RolloutGroupTable.purpose == Purpose.EVAL,
                RolloutGroupTable.label == EvaluationTable.label,
            ),
        )
        .outerjoin(
            RolloutTable, and_(RolloutTable.group_id == RolloutGroupTable.id, RolloutTable.replaced_by.is_(None))
        )
        .where(EvaluationTable.run_id == run_id)
        .group_by(*EvaluationTable.__table__.c)
        .order_by(EvaluationTable.created_at, EvaluationTable.label)
    )
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def ended_evaluations(connection: AsyncConnection, run_id: str) -> set[str]:
    statement = select(EvaluationTable.label).where(
        EvaluationTable.run_id == run_id, EvaluationTable.ended_at.is_not(None)
    )
    return set((await connection.execute(statement)).scalars())


def _groups_of(run_id: str, label: str) -> ColumnElement[bool]:
    return and_(
        RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.EVAL, RolloutGroupTable.label == label
    )


async def open_evaluation_members(connection: AsyncConnection, run_id: str, label: str) -> list[StartedMember]:
    """Return the members that have no reward and no replacement."""
    statement = (
        select(RolloutTable.id, RolloutTable.workflow_id, TaskTable.label)
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .where(_groups_of(run_id, label), groups.wants_running())
        .order_by(RolloutTable.id)
    )
    rows = await connection.execute(statement)
    return [StartedMember(rollout_id=row[0], workflow_id=row[1], task=row[2]) for row in rows]


async def evaluation_solve_rate(connection: AsyncConnection, run_id: str, label: str) -> SolveRate:
    """Return how many rollouts the evaluation has, how many have a reward, and the mean reward."""
    statement = (
        select(func.count(), func.count(RolloutTable.reward), func.avg(RolloutTable.reward))
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .where(_groups_of(run_id, label), RolloutTable.replaced_by.is_(None))
    )
    total, graded, mean = (await connection.execute(statement)).one()
    return SolveRate(total, graded, None if mean is None else float(mean))
