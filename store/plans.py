"""Plan rows (table `batch`): one per training step of a run, written once.

A plan row is the data cursor of a run: it fixes the members, weights and seed of its step, so that a replay after a
crash trains the same contents.
"""

from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, case, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import OPEN_STATES, BatchState, JsonObject
from store.columns import columns_of, read_one
from store.schema import BatchTable, PolicyVersionTable, RunTable


@dataclass(slots=True, frozen=True)
class PlanRow:
    """One plan row as stored.

    `members`: the fields of `training.plan_types.Member`, one object per rollout. `knobs`: loss settings, updates per
    step, the learning rate after warm-up, the lowest policy step that is trained and, if the step trains groups of
    another run again, that `source_run_id`. `denominators`: per update, trained tokens and rollouts, for display."""

    step: int
    members: list[JsonObject]
    knobs: JsonObject
    denominators: list[dict[str, int]]
    seed: int


async def lock_run_for_planning(connection: AsyncConnection, run_id: str) -> bool:
    """Lock the run's row, so that one transaction at a time consumes its groups; False if the run has ended."""
    statement = select(RunTable.state).where(RunTable.run_id == run_id).with_for_update(key_share=True)
    return (await connection.execute(statement)).scalar_one() in OPEN_STATES


async def insert_plan(connection: AsyncConnection, run_id: str, plan: PlanRow) -> None:
    """Insert the step's plan row in state `planned`."""
    await connection.execute(insert(BatchTable).values(run_id=run_id, **asdict(plan)))


async def get_plan(connection: AsyncConnection, run_id: str, step: int) -> PlanRow | None:
    statement = select(*columns_of(PlanRow, BatchTable)).where(BatchTable.run_id == run_id, BatchTable.step == step)
    return await read_one(connection, PlanRow, statement)


async def plan_state(connection: AsyncConnection, run_id: str, step: int) -> BatchState | None:
    statement = select(BatchTable.state).where(BatchTable.run_id == run_id, BatchTable.step == step)
    found = (await connection.execute(statement)).scalar_one_or_none()
    return BatchState(found) if found else None


async def newest_planned_step(connection: AsyncConnection, run_id: str) -> int:
    """Return the highest planned step, or 0 if no step is planned."""
    statement = select(func.max(BatchTable.step)).where(BatchTable.run_id == run_id)
    return int((await connection.execute(statement)).scalar_one() or 0)


async def unfinished_step(connection: AsyncConnection, run_id: str) -> int | None:
    """Return the lowest planned step that has not been trained, or None if all planned steps have."""
    statement = select(func.min(BatchTable.step)).where(
        BatchTable.run_id == run_id, BatchTable.state == BatchState.PLANNED
    )
    return (await connection.execute(statement)).scalar_one_or_none()


def first_trained_at() -> ColumnElement[datetime | None]:
    """Return when a plan row's step was first trained; NULL before that.

    A learner that starts anew trains the steps since its checkpoint once more and overwrites `stepped_at`; the first
    version that was published of the step keeps its time.
    """
    version = PolicyVersionTable
    published = (
        select(func.min(version.created_at))
        .where(version.run_id == BatchTable.run_id, version.step == BatchTable.step)
        .scalar_subquery()
    )
    return case((BatchTable.stepped_at.is_not(None), func.least(BatchTable.stepped_at, published)))
