"""Evaluations: the held-out tasks under one policy version at one temperature, and their solve rates."""

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.evaluation_payloads import StartedMember
from ratchet.types import OPEN_STATES, Outcome, Purpose, SteeringAction, Wish
from store import groups, plans, runs, steering
from store.columns import columns_of
from store.schema import EvaluationTable, RolloutGroupTable, RolloutTable, RunTable, SteeringTable, TaskTable
from store.steering import Request


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


@dataclass(slots=True, frozen=True)
class AskedEvaluation:
    """An evaluation that a person has asked for, which has not ended."""

    label: str
    temperature: float
    num_samples: int


@dataclass(slots=True, frozen=True)
class BegunEvaluation:
    """An evaluation that has a row."""

    label: str
    step: int
    temperature: float
    num_samples: int
    has_ended: bool

    @property
    def is_asked(self) -> bool:
        """True if a person asked for the evaluation; the others follow from the config."""
        return self.label.startswith(_ASKED)


_ASKED = "asked"
MIN_VERDICTS = 0.95
"""Share of an evaluation's rollouts that must have a verdict, for the evaluation to make its step the best one."""


def temperature_label(temperature: float) -> str:
    """Return the part of an evaluation's label that names its temperature."""
    return "greedy" if temperature == 0 else f"t{temperature:g}"


async def ask_evaluation(
    connection: AsyncConnection, request: Request, temperature: float, num_samples: int
) -> AskedEvaluation:
    """Record that a person wants the run's policy evaluated at the next step boundary.

    The request is a row of `steering`, whose target is the evaluation's label. A repeated request, and one for what is
    asked already and has not ended, returns the first one's evaluation. Raises ConfigError if the run has ended, is to
    end, or has no held-out tasks.
    """
    await plans.lock_run_for_planning(connection, request.run_id)
    asked = await _asked(connection, request.run_id)
    if request.request_id in asked:
        return asked[request.request_id]
    row = await runs.get_run(connection, request.run_id)
    if row is None or row.state not in OPEN_STATES or row.wish == Wish.STOP:
        raise ConfigError(f"run {request.run_id} is not open; evaluate one of its steps as {request.run_id}@STEP")
    if not await runs.count_run_tasks(connection, request.run_id, Purpose.EVAL):
        raise ConfigError(f"run {request.run_id} has no dataset with `use: eval`")
    for one in await asked_evaluations(connection, request.run_id):
        if (one.temperature, one.num_samples) == (temperature, num_samples):
            return one
    label = f"{_ASKED}{len(asked) + 1}-{temperature_label(temperature)}"
    after = {"temperature": temperature, "samples": num_samples}
    step = await plans.newest_planned_step(connection, request.run_id) + 1
    await steering.record(connection, request, SteeringAction.EVALUATE, label, None, after, step)
    return AskedEvaluation(label, temperature, num_samples)


async def _asked(connection: AsyncConnection, run_id: str) -> dict[str, AskedEvaluation]:
    """Return the id of each request for an evaluation and what it asks for, oldest first."""
    statement = select(SteeringTable.request_id, SteeringTable.target, SteeringTable.after).where(
        SteeringTable.run_id == run_id, SteeringTable.action == SteeringAction.EVALUATE
    )
    rows = await connection.execute(statement.order_by(SteeringTable.id))
    return {row.request_id: AskedEvaluation(row.target, row.after["temperature"], row.after["samples"]) for row in rows}


async def asked_evaluations(connection: AsyncConnection, run_id: str) -> list[AskedEvaluation]:
    """Return the evaluations that people have asked for and that have not ended, oldest first."""
    ended = await ended_evaluations(connection, run_id)
    return [one for one in (await _asked(connection, run_id)).values() if one.label not in ended]


async def _keep_best(connection: AsyncConnection, run_id: str) -> None:
    """Make the step with the highest mean reward the run's best one, whose weights and checkpoint are kept.

    All ended evaluations at the first of `evaluation.temperatures` are compared anew, because verdicts may have come
    or changed since. The first of equal steps is the best. Evaluations with too few verdicts do not count: what is
    missing may be the hard tasks.
    """
    row = await runs.the_run(connection, run_id)
    rate = func.avg(RolloutTable.reward)
    num_verdicts = func.count(RolloutTable.reward)
    best = (
        select(EvaluationTable.step, rate)
        .select_from(EvaluationTable)
        .join(RolloutGroupTable, _groups_of(EvaluationTable.run_id, EvaluationTable.label))
        .join(RolloutTable, and_(RolloutTable.group_id == RolloutGroupTable.id, RolloutTable.replaced_by.is_(None)))
        .where(
            EvaluationTable.run_id == run_id,
            EvaluationTable.ended_at.is_not(None),
            EvaluationTable.temperature.in_(row.resolved_config.evaluation.temperatures[:1]),
        )
        .group_by(EvaluationTable.label, EvaluationTable.step)
        .having(num_verdicts > 0, num_verdicts >= MIN_VERDICTS * func.count())
        .order_by(rate.desc(), EvaluationTable.step)
        .limit(1)
    )
    found = (await connection.execute(best)).one_or_none()
    values = {"best_step": found[0], "best_rate": found[1]} if found else {"best_step": None, "best_rate": None}
    await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(**values))


async def begin_evaluation(connection: AsyncConnection, new: NewEvaluation) -> bool:
    """Insert the evaluation's row; return False if it exists already."""
    statement = insert(EvaluationTable).values(**asdict(new)).on_conflict_do_nothing()
    return (await connection.execute(statement)).rowcount == 1


async def end_evaluation(connection: AsyncConnection, run_id: str, label: str) -> None:
    """End the evaluation, cancel its rollouts without a workflow, and compare the run's steps anew (`_keep_best`)."""
    await plans.lock_run_for_planning(connection, run_id)  # of two evaluations that end, the second sees both
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
    await _keep_best(connection, run_id)


async def reopen_evaluation(connection: AsyncConnection, run_id: str, label: str) -> list[StartedMember]:
    """Replace the rollouts of an evaluation that ended without a verdict, and let it run again.

    Returns the members that then have to run: the new ones, and those that its lost workflow had not begun.
    """
    statement = (
        select(RolloutGroupTable.id)
        .distinct()
        .join(RolloutTable, RolloutTable.group_id == RolloutGroupTable.id)
        .where(_groups_of(run_id, label), groups.ended_without_verdict())
        .order_by(RolloutGroupTable.id)
    )
    for group_id in (await connection.execute(statement)).scalars().all():
        await groups.retry_members(connection, group_id)
    waiting = await open_evaluation_members(connection, run_id, label)
    if waiting:
        mine = update(EvaluationTable).where(EvaluationTable.run_id == run_id, EvaluationTable.label == label)
        await connection.execute(mine.values(ended_at=None))
    return waiting


async def begun_evaluations(connection: AsyncConnection, run_id: str) -> list[BegunEvaluation]:
    """Return the evaluations of the run that have begun, oldest first."""
    columns = columns_of(BegunEvaluation, EvaluationTable, has_ended=EvaluationTable.ended_at.is_not(None))
    statement = select(*columns).where(EvaluationTable.run_id == run_id)
    ordered = statement.order_by(EvaluationTable.created_at, EvaluationTable.label)
    return [BegunEvaluation(*row) for row in await connection.execute(ordered)]


async def ended_evaluations(connection: AsyncConnection, run_id: str) -> set[str]:
    return {one.label for one in await begun_evaluations(connection, run_id) if one.has_ended}


async def is_being_evaluated(connection: AsyncConnection, run_id: str) -> bool:
    """Return whether an evaluation of the newest version runs; older ones that were left open are not waited for."""
    newest = await runs.published_step(connection, run_id)
    here = (EvaluationTable.run_id == run_id) & (EvaluationTable.step == newest) & EvaluationTable.ended_at.is_(None)
    return bool((await connection.execute(select(exists().where(here)))).scalar_one())


def _groups_of(run_id: Any, label: Any) -> ColumnElement[bool]:
    """Return the condition for the groups of an evaluation. `run_id`, `label`: values, or columns of it."""
    return and_(
        RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.EVAL, RolloutGroupTable.label == label
    )


async def open_evaluation_members(
    connection: AsyncConnection, run_id: str, label: str, after: int = 0, limit: int | None = None
) -> list[StartedMember]:
    """Return `limit` members after the id `after` that have neither reward nor replacement, by id."""
    statement = (
        select(RolloutTable.id, RolloutTable.workflow_id, TaskTable.label)
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .where(_groups_of(run_id, label), groups.wants_running(), RolloutTable.id > after)
        .order_by(RolloutTable.id)
        .limit(limit)
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
    return SolveRate(*(await connection.execute(statement)).one())
