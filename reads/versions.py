"""The policy versions of a run, when each was published, and when the engines loaded it."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, func, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from store.columns import columns_of
from store.schema import EngineLoadTable, MetricTable, PolicyVersionTable


@dataclass(slots=True, frozen=True)
class VersionLine:
    """A published version. `sync_seconds`: how long the slowest engine took to load it, the pause of its calls
    included; None if no engine has loaded this version as an update. `num_loads`: how often engines loaded it, at their
    starts too; `first_loaded_at` and `last_loaded_at`: the first and the last of these, None if no engine did."""

    version: str
    step: int
    state: str
    published_at: datetime
    sync_seconds: float | None
    num_loads: int
    first_loaded_at: datetime | None
    last_loaded_at: datetime | None


async def published_versions(
    connection: AsyncConnection, run_id: str, limit: int, before_step: int | None = None
) -> list[VersionLine]:
    """Return the run's versions, newest first; `before_step`: only those of earlier steps."""
    loads = (
        select(
            func.count().label("num_loads"),
            func.min(EngineLoadTable.loaded_at).label("first_loaded_at"),
            func.max(EngineLoadTable.loaded_at).label("last_loaded_at"),
        )
        .where(EngineLoadTable.version == PolicyVersionTable.version)
        .lateral()
    )
    sync_seconds = case((loads.c.num_loads > 0, MetricTable.value))
    of_version = {"published_at": PolicyVersionTable.created_at, "sync_seconds": sync_seconds}
    statement = (
        select(*columns_of(VersionLine, PolicyVersionTable, **of_version, **loads.c))
        .select_from(PolicyVersionTable)
        .join(loads, true())
        .outerjoin(
            MetricTable,
            (MetricTable.run_id == PolicyVersionTable.run_id)
            & (MetricTable.step == PolicyVersionTable.step)
            & (MetricTable.name == "sync_seconds"),
        )
        .where(PolicyVersionTable.run_id == run_id)
        .order_by(PolicyVersionTable.step.desc(), PolicyVersionTable.epoch.desc())
        .limit(limit)
    )
    if before_step is not None:
        statement = statement.where(PolicyVersionTable.step < before_step)
    return [VersionLine(*row) for row in await connection.execute(statement)]


@dataclass(slots=True, frozen=True)
class LearnerRestart:
    """A learner that took the place of an earlier one. `step`: the first one that it published, and when."""

    epoch: int
    step: int
    published_at: datetime


async def list_restarts(connection: AsyncConnection, run_id: str) -> list[LearnerRestart]:
    """Return the learners of the run that have trained a step, except for the first, oldest first."""
    table = PolicyVersionTable
    statement = (
        select(table.epoch, func.min(table.step), func.min(table.created_at))
        .where(table.run_id == run_id, table.step > 0)
        .group_by(table.epoch)
        .order_by(table.epoch)
        .offset(1)
    )
    return [LearnerRestart(*row) for row in await connection.execute(statement)]
