"""Checkpoints of a run, as people ask for them. (The learner writes them: `training/learner_commits.py`.)

Why here: one file per aggregate.
Called by: `ratchet checkpoints`, `training/ray_driver.py`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store import runs
from ratchet.store.schema import CheckpointTable


@dataclass(slots=True, frozen=True)
class CheckpointRow:
    """`initial_uri`: the run's version 0, whose configuration and tokenizer the weights belong to."""

    step: int
    epoch: int
    uri: str
    world_size: int
    num_threads: int
    initial_uri: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def list_checkpoints(connection: AsyncConnection, run_id: str) -> list[CheckpointRow]:
    """Newest first."""
    first = await runs.newest_version(connection, run_id, 0)
    columns = (
        CheckpointTable.step,
        CheckpointTable.epoch,
        CheckpointTable.uri,
        CheckpointTable.world_size,
        CheckpointTable.num_threads,
    )
    rows = await connection.execute(
        select(*columns).where(CheckpointTable.run_id == run_id).order_by(CheckpointTable.step.desc())
    )
    return [CheckpointRow(*row, first.uri if first else "") for row in rows]
