"""The times of a run's newest steps, read from the ledger: boxes, calls, rollouts, groups, plan rows.

Times are seconds since the epoch, by the clock of Postgres.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import ARRAY, BigInteger, any_, cast, func, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import GroupState, Purpose, SandboxRole
from store import plans
from store.columns import count_rows, seconds_of
from store.schema import (
    BatchItemTable,
    BatchTable,
    EvaluationTable,
    MetricTable,
    RolloutGroupTable,
    RolloutTable,
    SandboxTable,
    SessionTable,
    TurnTable,
)

TRAINED = "trained"
_OF_LEARNER = ("load_seconds", "step_seconds", "publish_seconds", "upload_seconds")
_TRAINED_TOKENS = text(
    """
    SELECT CAST(member->>'rollout_id' AS bigint) AS rollout_id, CAST(member->>'num_tokens' AS bigint) AS num_tokens
    FROM batch, jsonb_array_elements(batch.members) AS member
    WHERE run_id = :run AND step = ANY(CAST(:steps AS int[]))
    """
)


@dataclass(slots=True, frozen=True)
class BoxTimes:
    """A box: when it was granted, when it was there, when it was released; None if that has not happened."""

    is_grading: bool
    granted: float
    live: float | None
    released: float | None


@dataclass(slots=True)
class RolloutTimes:
    """A rollout that has ended. `call_seconds`: of its model calls, in which `wait_seconds` no engine worked on them.

    `agent_seconds`: of the agent's program, None if it is not known. `num_trained`: its tokens that a step has trained,
    by the plan row.
    """

    rollout_id: int
    group_id: int
    created: float
    ended: float
    agent_seconds: float | None
    boxes: list[BoxTimes] = field(default_factory=list)
    call_seconds: float = 0.0
    wait_seconds: float = 0.0
    num_sampled: int = 0
    num_trained: int = 0


@dataclass(slots=True, frozen=True)
class GroupTimes:
    """A group that a step has consumed, or that failed meanwhile, which has no step. `ready`: when its last member had
    ended. `use`: `trained`, or why not."""

    group_id: int
    step: int | None
    use: str
    created: float
    ready: float


@dataclass(slots=True, frozen=True)
class TrainedStepTimes:
    """A step: when its plan row was written, when it was trained, and how long the engines' update took.

    A learner that starts anew trains the steps since its checkpoint once more; `stepped` is of the first time.
    `worked_seconds`: in which the learner loaded the batch, trained it and wrote the weights; None if not recorded.
    """

    step: int
    planned: float
    stepped: float
    sync_seconds: float
    worked_seconds: float | None = None


@dataclass(slots=True, frozen=True)
class Interval:
    start: float
    end: float


@dataclass(slots=True)
class RunTimes:
    """The recorded times of a run's newest steps. `began`: when the step before them was trained, None without one.
    `num_trained_steps`: of the whole run."""

    run_id: str
    steps: list[TrainedStepTimes]
    groups: list[GroupTimes]
    rollouts: list[RolloutTimes]
    evaluations: list[Interval]
    began: float | None = None
    num_trained_steps: int = 0


async def read_run_times(connection: AsyncConnection, run_id: str, num_steps: int) -> RunTimes:
    """Read the newest `num_steps` trained steps, with the groups that they consumed."""
    read = await _steps(connection, run_id, num_steps + 1)
    before, steps = (read[0], read[1:]) if len(read) > num_steps else (None, read)
    numbers = [one.step for one in steps]
    groups = await _groups(connection, run_id, numbers)
    begun, ended = seconds_of(EvaluationTable.created_at), seconds_of(EvaluationTable.ended_at)
    trained = await connection.execute(_TRAINED_TOKENS, {"run": run_id, "steps": numbers})
    num_trained = {row.rollout_id: row.num_tokens for row in trained}
    evaluated = await connection.execute(
        select(begun, ended).where(EvaluationTable.run_id == run_id, EvaluationTable.ended_at.is_not(None))
    )
    return RunTimes(
        run_id=run_id,
        steps=steps,
        groups=groups,
        rollouts=await _rollouts(connection, [one.group_id for one in groups], num_trained),
        evaluations=[Interval(*row) for row in evaluated],
        began=None if before is None else before.stepped + before.sync_seconds,
        num_trained_steps=await count_rows(connection, BatchTable.run_id == run_id, BatchTable.stepped_at.is_not(None)),
    )


async def _steps(connection: AsyncConnection, run_id: str, num_steps: int) -> list[TrainedStepTimes]:
    statement = (
        select(
            BatchTable.step,
            seconds_of(BatchTable.planned_at),
            seconds_of(plans.first_trained_at()),
            func.coalesce(func.max(MetricTable.value).filter(MetricTable.name == "sync_seconds"), 0.0),
            func.sum(MetricTable.value).filter(MetricTable.name.in_(_OF_LEARNER)),
        )
        .outerjoin(
            MetricTable,
            (MetricTable.run_id == BatchTable.run_id)
            & (MetricTable.step == BatchTable.step)
            & MetricTable.name.in_(("sync_seconds", *_OF_LEARNER)),
        )
        .where(BatchTable.run_id == run_id, BatchTable.stepped_at.is_not(None))
        .group_by(BatchTable.run_id, BatchTable.step)
        .order_by(BatchTable.step.desc())
        .limit(num_steps)
    )
    rows = (await connection.execute(statement)).all()
    return [TrainedStepTimes(*row) for row in reversed(rows)]


async def _groups(connection: AsyncConnection, run_id: str, steps: Sequence[int]) -> list[GroupTimes]:
    """Return the groups that these steps have consumed, and those that failed since the first of them was made."""
    columns = (
        RolloutGroupTable.id,
        BatchItemTable.step,
        func.coalesce(BatchItemTable.use, RolloutGroupTable.state),
        seconds_of(RolloutGroupTable.created_at),
        seconds_of(func.coalesce(RolloutGroupTable.ready_at, RolloutGroupTable.created_at)),
    )
    of_run = (BatchItemTable.group_id == RolloutGroupTable.id) & (BatchItemTable.run_id == run_id)
    joined = select(*columns).outerjoin(BatchItemTable, of_run)  # other runs may train on the same groups
    of_steps = (BatchItemTable.run_id == run_id) & BatchItemTable.step.in_(steps)
    first = (
        select(func.min(RolloutGroupTable.created_at))
        .join(BatchItemTable, BatchItemTable.group_id == RolloutGroupTable.id)
        .where(of_steps)
        .scalar_subquery()
    )
    failed = (
        (RolloutGroupTable.run_id == run_id)
        & (RolloutGroupTable.purpose == Purpose.TRAIN)
        & (RolloutGroupTable.state == GroupState.FAILED)
        & (RolloutGroupTable.created_at >= first)
    )
    # The ids first, each part by its index: one condition over both tables would read all groups of all runs.
    ids = union_all(select(BatchItemTable.group_id).where(of_steps), select(RolloutGroupTable.id).where(failed))
    rows = await connection.execute(joined.where(RolloutGroupTable.id.in_(ids)).order_by(RolloutGroupTable.id))
    return [GroupTimes(*row) for row in rows]


async def _rollouts(
    connection: AsyncConnection, group_ids: Sequence[int], trained: Mapping[int, int]
) -> list[RolloutTimes]:
    """Return the ended rollouts of these groups, replaced ones included. `trained`: tokens per rollout."""
    wanted = RolloutTable.group_id == any_(cast(list(group_ids), ARRAY(BigInteger)))
    rows = await connection.execute(
        select(
            RolloutTable.id,
            RolloutTable.group_id,
            seconds_of(RolloutTable.created_at),
            seconds_of(RolloutTable.ended_at),
            RolloutTable.timings["agent"].as_float(),
        )
        .where(wanted, RolloutTable.ended_at.is_not(None))
        .order_by(RolloutTable.id)
    )
    found = {row[0]: RolloutTimes(*row) for row in rows}
    for rollout in found.values():
        rollout.num_trained = trained.get(rollout.rollout_id, 0)
    ids = select(RolloutTable.id).where(wanted)
    boxes = await connection.execute(
        select(
            SandboxTable.rollout_id,
            SandboxTable.role == SandboxRole.GRADE,
            seconds_of(SandboxTable.created_at),
            seconds_of(SandboxTable.live_at),
            seconds_of(SandboxTable.released_at),
        )
        .where(SandboxTable.rollout_id.in_(ids))
        .order_by(SandboxTable.id)
    )
    for rollout_id, *times in boxes:
        if rollout_id in found:
            found[rollout_id].boxes.append(BoxTimes(*times))
    calls = await connection.execute(
        select(
            SessionTable.rollout_id,
            func.sum(seconds_of(TurnTable.completed_at - TurnTable.created_at)),
            func.sum(TurnTable.engine_wait_seconds),
            func.sum(TurnTable.num_sampled),
        )
        .join(SessionTable, SessionTable.id == TurnTable.session_id)
        .where(SessionTable.rollout_id.in_(ids), TurnTable.completed_at.is_not(None))
        .group_by(SessionTable.rollout_id)
    )
    for rollout_id, call_seconds, wait_seconds, num_sampled in calls:
        if rollout_id in found:
            found[rollout_id].call_seconds = call_seconds
            found[rollout_id].wait_seconds = wait_seconds
            found[rollout_id].num_sampled = int(num_sampled)
    return list(found.values())


_CALLS = text(
    """
    WITH given AS (SELECT CAST(:start AS float8) AS start, CAST(:width AS float8) AS width, CAST(:last AS int) AS last),
    calls AS (
      SELECT extract(epoch FROM created_at) - start AS begun, extract(epoch FROM completed_at) - start AS ended,
        num_sampled, width, last
      FROM turn, given WHERE rollout_id = ANY(CAST(:rollouts AS bigint[])) AND completed_at IS NOT NULL)
    SELECT part, sum(greatest(0, least(ended, (part + 1) * width) - greatest(begun, part * width))),
      sum(num_sampled) FILTER (WHERE part = floor(ended / width))
    FROM calls, generate_series(
      CAST(greatest(0, floor(begun / width)) AS int), CAST(least(last, floor(ended / width)) AS int)) part
    GROUP BY part
    """
)


@dataclass(slots=True, frozen=True)
class CallUse:
    """Part `part` of a stretch of time: the calls' seconds in it, and the tokens of the calls that ended in it."""

    part: int
    call_seconds: float
    num_sampled: int


async def read_call_use(
    connection: AsyncConnection, rollout_ids: Sequence[int], start: float, end: float, num_parts: int
) -> list[CallUse]:
    """Return the model calls of these rollouts by equal parts of [start, end), which are seconds since the epoch."""
    values = {"rollouts": list(rollout_ids), "start": start, "width": (end - start) / num_parts, "last": num_parts - 1}
    rows = await connection.execute(_CALLS, values)
    return [CallUse(row[0], float(row[1] or 0.0), int(row[2] or 0)) for row in rows]
