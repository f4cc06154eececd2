"""The learner's row per run: what it does now, for those who wait for it; and what a learner has to do, for itself.

Why here: one file per aggregate.
Called by: the learner and its service (write, ask), `activities/learning.py` and the CLI (read).
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.runs import ADHOC
from ratchet.store.schema import Batch, Learner, Run
from ratchet.types import RunState

PUBLISHING = "publishing"
"""The phase in which new weights are written and, where the run says so, sent."""


@dataclass(slots=True, frozen=True)
class LearnerRow:
    epoch: int
    world_size: int
    phase: str
    step: int
    silent_seconds: float
    details: dict[str, Any]


async def heartbeat(
    connection: AsyncConnection,
    run_id: str,
    epoch: int,
    world_size: int,
    phase: str,
    step: int,
    details: dict[str, Any],
) -> bool:
    """False where a learner with a higher epoch has taken over: this one must stop. `details` are added to those of before."""
    values = {
        "epoch": epoch,
        "world_size": world_size,
        "phase": phase,
        "step": step,
        "details": details,
        "heartbeat_at": func.now(),
    }
    statement = insert(Learner).values(run_id=run_id, **values)
    known = values | {"details": Learner.details.op("||")(statement.excluded.details)}
    statement = statement.on_conflict_do_update(index_elements=["run_id"], set_=known, where=Learner.epoch <= epoch)
    return (await connection.execute(statement)).rowcount == 1


async def get(connection: AsyncConnection, run_id: str) -> LearnerRow | None:
    silent = func.extract("epoch", func.now() - Learner.heartbeat_at)
    statement = select(Learner.epoch, Learner.world_size, Learner.phase, Learner.step, silent, Learner.details)
    row = (await connection.execute(statement.where(Learner.run_id == run_id))).one_or_none()
    return LearnerRow(row[0], row[1], row[2], row[3], float(row[4]), row[5]) if row else None


async def count_failure(connection: AsyncConnection, run_id: str, epoch: int, world_size: int, step: int) -> int:
    """How many learners, this one of `epoch` included, have failed since the checkpoint of `step`; one counts once, whatever its ranks.

    Those that were killed said nothing and do not count. The caller holds the run's row.
    """
    details = (
        await connection.execute(select(Learner.details).where(Learner.run_id == run_id))
    ).scalar_one_or_none() or {}
    before = details.get("failures", {})
    before = before if before.get("step") == step else {}
    count = int(before.get("count", 0)) + (before.get("epoch") != epoch)
    failures = {"step": step, "epoch": epoch, "count": count}
    await heartbeat(connection, run_id, epoch, world_size, "failed", step, {"failures": failures})
    return count


async def is_planned(connection: AsyncConnection, run_id: str, epoch: int, step: int) -> bool | None:
    """Whether the step's plan row is there; None where the learner of this epoch has nothing more to do. One query: it is polled."""
    statement = (
        select(Run.state, Run.epoch, Batch.step)
        .outerjoin(Batch, and_(Batch.run_id == Run.run_id, Batch.step == step))
        .where(Run.run_id == run_id)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None or row.epoch != epoch or row.state not in (RunState.RUNNING, RunState.PAUSED):
        return None
    return row.step is not None


async def wanted(connection: AsyncConnection) -> dict[str, float | None]:
    """Runs that need a learner → seconds since one was last heard of, None: never.

    Running ones with steps left to commit. A paused run keeps the learner it has, and gets none.
    """
    silent = func.extract("epoch", func.now() - Learner.heartbeat_at)
    statement = (
        select(Run.run_id, silent)
        .outerjoin(Learner, Learner.run_id == Run.run_id)
        .where(Run.state == RunState.RUNNING, Run.config_name != ADHOC)
        .where(Run.checkpoint_step < Run.config["training"]["steps"].as_integer())
        .order_by(Run.created_at)
    )
    return {row[0]: None if row[1] is None else float(row[1]) for row in await connection.execute(statement)}
