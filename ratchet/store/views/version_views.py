"""The policy versions of a run, and when each was published and loaded."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import MetricTable, PolicyVersionTable


@dataclass(slots=True, frozen=True)
class VersionLine:
    """A published version. `sync_seconds`: how long the slowest engine took to load it, the pause of its calls
    included; None if no engine has loaded it as an update. When an engine began is not stored."""

    version: str
    step: int
    state: str
    published_at: datetime
    sync_seconds: float | None


async def published_versions(
    connection: AsyncConnection, run_id: str, limit: int, before_step: int | None = None
) -> list[VersionLine]:
    """Return the run's versions, newest first; `before_step`: only those of earlier steps."""
    statement = (
        select(
            PolicyVersionTable.version,
            PolicyVersionTable.step,
            PolicyVersionTable.state,
            PolicyVersionTable.created_at,
            MetricTable.value,
        )
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
