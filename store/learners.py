"""The learner's row per run: its phase and heartbeat, and which runs need a learner."""

from dataclasses import dataclass
from enum import Enum

from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import OPEN_STATES, JsonObject, RunState
from store.columns import columns_of, read_one, seconds_since
from store.runs import ADHOC
from store.schema import BatchTable, LearnerTable, RunTable

LOADING_MODEL = "loading the model"
"""Phase of a learner that starts: it loads the model and the newest checkpoint."""
WAITING = "waiting for a plan"
"""Phase in which no plan row of the next step is there."""
EVALUATED = "waiting for the evaluation"
"""Phase in which the version that the next one replaces is evaluated."""
TRAINED_ALL = "done"
HAS_FAILED = "failed"
_LOADING_SILENT_SECONDS = 60.0
"""A learner that loads its model and has been silent for longer has died."""
PUBLISHING = "publishing"
"""Phase in which new weights are written."""
_SILENT = seconds_since(LearnerTable.heartbeat_at)


@dataclass(slots=True, frozen=True)
class LearnerRow:
    """The state of a run's learner. `silent_seconds`: time since its last heartbeat."""

    epoch: int
    world_size: int
    phase: str
    step: int
    silent_seconds: float
    details: JsonObject

    def failures_since(self, checkpoint_step: int) -> int:
        """Return how many learners in a row have failed since the checkpoint of this step."""
        failures = self.details.get("failures", {})
        return int(failures.get("count", 0)) if failures.get("step") == checkpoint_step else 0


async def heartbeat_learner(
    connection: AsyncConnection, run_id: str, epoch: int, world_size: int, phase: str, step: int, details: JsonObject
) -> bool:
    """Store a heartbeat and merge `details`; False if a learner with a higher epoch has taken over: stop then."""
    values = {
        "epoch": epoch,
        "world_size": world_size,
        "phase": phase,
        "step": step,
        "details": details,
        "heartbeat_at": func.now(),
    }
    statement = insert(LearnerTable).values(run_id=run_id, **values)
    known = values | {"details": LearnerTable.details.op("||")(statement.excluded.details)}
    statement = statement.on_conflict_do_update(
        index_elements=["run_id"], set_=known, where=LearnerTable.epoch <= epoch
    )
    return (await connection.execute(statement)).rowcount == 1


async def get_learner(connection: AsyncConnection, run_id: str) -> LearnerRow | None:
    statement = select(*columns_of(LearnerRow, LearnerTable, silent_seconds=_SILENT))
    return await read_one(connection, LearnerRow, statement.where(LearnerTable.run_id == run_id))


async def count_learner_failure(
    connection: AsyncConnection, run_id: str, epoch: int, world_size: int, step: int
) -> int:
    """Record the failure of the learner of `epoch` and return how many have failed since the checkpoint of `step`.

    A learner counts once, even if several ranks report it; killed learners report nothing and are not counted. The
    caller holds the lock of the run's row.
    """
    learner = await get_learner(connection, run_id)
    before = learner.details.get("failures", {}) if learner is not None else {}
    before = before if before.get("step") == step else {}
    count = int(before.get("count", 0)) + (before.get("epoch") != epoch)
    failures = {"step": step, "epoch": epoch, "count": count}
    await heartbeat_learner(connection, run_id, epoch, world_size, HAS_FAILED, step, {"failures": failures})
    return count


def _wants_learner() -> ColumnElement[bool]:
    """Return the condition that a run is running and has steps left to commit."""
    is_training = and_(RunTable.state == RunState.RUNNING, RunTable.config_name != ADHOC)
    return and_(is_training, RunTable.checkpoint_step < last_step())


async def is_starting(connection: AsyncConnection, run_id: str) -> bool:
    """Return whether a run wants a learner, and its learner has not begun to wait for a plan.

    It starts when a run begins, is resumed or extended, and anew after `ratchet resume --skip-step`, which fences the
    other one.
    """
    columns = (RunTable.epoch, LearnerTable.epoch.label("of_learner"), LearnerTable.phase, _SILENT.label("silent"))
    joined = select(*columns).outerjoin(LearnerTable, LearnerTable.run_id == RunTable.run_id)
    row = (await connection.execute(joined.where(RunTable.run_id == run_id, _wants_learner()))).one_or_none()
    if row is None:
        return False
    if row.of_learner is None or row.of_learner < row.epoch or row.phase in (TRAINED_ALL, HAS_FAILED):
        return True
    return bool(row.phase == LOADING_MODEL and row.silent < _LOADING_SILENT_SECONDS)


class NextStep(Enum):
    """The state of a step, for the learner of an epoch."""

    PLANNED = "the step has a plan row"
    UNPLANNED = "the step may still be planned"
    NONE = "the run ends before this step, so the step before it is the last"
    FENCED = "the run has ended, or another learner has taken over"


async def next_step(connection: AsyncConnection, run_id: str, epoch: int, step: int) -> NextStep:
    """Return what the learner of this epoch has to do about the step. Polled: one query.

    A paused run's planned steps are trained, unless all of its steps were planned at once, from stored rollouts.
    """
    columns = (RunTable.state, RunTable.epoch, RunTable.source_run_id, BatchTable.step)
    statement = (
        select(*columns, last_step().label("last_step"))
        .outerjoin(BatchTable, and_(BatchTable.run_id == RunTable.run_id, BatchTable.step == step))
        .where(RunTable.run_id == run_id)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None or row.epoch != epoch or row.state not in OPEN_STATES:
        return NextStep.FENCED
    if step > row.last_step:
        return NextStep.NONE
    waits = row.state == RunState.PAUSED and row.source_run_id is not None
    return NextStep.UNPLANNED if row.step is None or waits else NextStep.PLANNED


def last_step() -> ColumnElement[int]:
    """Return the step after which the run ends: the config's last, or the one that a person has stopped it at."""
    return func.least(RunTable.config["training"]["steps"].as_integer(), RunTable.stop_at)


async def runs_wanting_learner(connection: AsyncConnection) -> dict[str, float | None]:
    """Return running runs with steps to commit, and the seconds since a heartbeat (None: never); no paused ones."""
    statement = (
        select(RunTable.run_id, _SILENT)
        .outerjoin(LearnerTable, LearnerTable.run_id == RunTable.run_id)
        .where(_wants_learner())
        .order_by(RunTable.created_at)
    )
    return {run_id: silent for run_id, silent in await connection.execute(statement)}
