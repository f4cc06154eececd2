"""Read the verdicts of an evaluation task by task, and report pass@k and pass^k over all, by dataset and by family."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.solve_rates import SolvedCount, estimate, pass_all_k, pass_at_k, reported_ks
from ratchet.types import REWARDED_OUTCOMES, JsonObject, Purpose
from store.evaluations import begun_evaluations
from store.schema import GradeTable, RolloutGroupTable, RolloutTable, TaskTable


@dataclass(slots=True, frozen=True)
class EvaluatedTask:
    """A task of an evaluation. `task`: digest of its row, which is the same in every run. `count`: of its verdicts;
    `reward`: their mean."""

    task: str
    label: str
    dataset: str
    family: str
    num_rollouts: int
    count: SolvedCount
    reward: float | None


async def find_evaluation(connection: AsyncConnection, run_id: str, label: str | None) -> str:
    """Return the label, or that of the run's newest evaluation that has ended. Raises ConfigError if there is none, or
    if it has not ended: the tasks that have verdicts first are not a sample."""
    found = await begun_evaluations(connection, run_id)
    ended = [one.label for one in found if one.has_ended]
    if not found:
        raise ConfigError(f"run {run_id!r} has no evaluation; `ratchet evaluate {run_id}` makes one")
    if label is not None and label not in {one.label for one in found}:
        raise ConfigError(f"run {run_id} has no evaluation {label!r}; it has {', '.join(one.label for one in found)}")
    wanted = label or (ended or [found[-1].label])[-1]
    if wanted not in ended:
        raise ConfigError(
            f"evaluation {wanted} of run {run_id} has not ended; `ratchet status {run_id}` says how far it is"
        )
    return wanted


async def evaluated_tasks(connection: AsyncConnection, run_id: str, label: str) -> list[EvaluatedTask]:
    """Return the tasks of an evaluation. A rollout has a verdict if it was graded or rejected, and only then counts."""
    has_verdict = RolloutTable.outcome.in_(REWARDED_OUTCOMES)
    is_solved = has_verdict & GradeTable.solved & ~GradeTable.rejected
    family = func.coalesce(TaskTable.spec["family"].astext, "")
    statement = (
        select(
            TaskTable.row_digest,
            TaskTable.label,
            TaskTable.dataset,
            family,
            func.count(),
            func.count().filter(has_verdict),
            func.count().filter(is_solved),
            func.avg(RolloutTable.reward),
        )
        .select_from(RolloutTable)
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .outerjoin(GradeTable, GradeTable.id == RolloutTable.grade_id)
        .where(
            RolloutGroupTable.run_id == run_id,
            RolloutGroupTable.purpose == Purpose.EVAL,
            RolloutGroupTable.label == label,
            RolloutTable.replaced_by.is_(None),
        )
        .group_by(TaskTable.id, TaskTable.row_digest, TaskTable.label, TaskTable.dataset, family)
        .order_by(TaskTable.id)
    )
    rows = await connection.execute(statement)
    return [EvaluatedTask(row[0], row[1], row[2], row[3], row[4], SolvedCount(row[5], row[6]), row[7]) for row in rows]


def report_evaluation(tasks: Sequence[EvaluatedTask]) -> JsonObject:
    """Return the counts, pass@k and pass^k with intervals, and the same by dataset and by family."""
    by_dataset: dict[str, list[EvaluatedTask]] = defaultdict(list)
    by_family: dict[str, list[EvaluatedTask]] = defaultdict(list)
    for task in tasks:
        by_dataset[task.dataset].append(task)
        if task.family:
            by_family[task.family].append(task)
    return {
        **_report(tasks),
        "by_dataset": {name: _report(found) for name, found in sorted(by_dataset.items())},
        "by_family": {name: _report(found) for name, found in sorted(by_family.items())},
    }


def _report(tasks: Sequence[EvaluatedTask]) -> JsonObject:
    counts = [task.count for task in tasks]
    num_rollouts = sum(task.num_rollouts for task in tasks)
    num_verdicts = sum(count.num_verdicts for count in counts)
    ks = reported_ks(counts)
    return {
        "tasks": len(tasks),
        "rollouts": num_rollouts,
        "verdicts": num_verdicts,
        "without_verdict": num_rollouts - num_verdicts,
        "solved": sum(count.num_solved for count in counts),
        "pass_at_k": {str(k): asdict(estimate(pass_at_k, counts, k)) for k in ks},
        "pass_all_k": {str(k): asdict(estimate(pass_all_k, counts, k)) for k in ks},
    }
