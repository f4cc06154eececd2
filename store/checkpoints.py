"""Reports on the checkpoints of a run; the learner writes them when it commits steps."""

from dataclasses import asdict, dataclass

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import JsonObject
from store import runs
from store.schema import CheckpointTable, RunTable


@dataclass(slots=True, frozen=True)
class CheckpointRow:
    """`initial_uri`, `initial_files`: the run's version 0, with the model config and tokenizer of the weights."""

    step: int
    epoch: int
    uri: str
    world_size: int
    num_threads: int
    initial_uri: str
    initial_files: list[JsonObject]

    def as_dict(self) -> JsonObject:
        values = asdict(self)
        del values["initial_files"]
        return values


async def list_checkpoints(connection: AsyncConnection, run_id: str) -> list[CheckpointRow]:
    """Return the run's checkpoints, newest first."""
    first = await runs.newest_version(connection, run_id, 0)
    table = CheckpointTable
    columns = (table.step, table.epoch, table.uri, table.world_size, table.num_threads)
    rows = await connection.execute(select(*columns).where(table.run_id == run_id).order_by(table.step.desc()))
    initial = (first.uri, first.files) if first else ("", [])
    return [CheckpointRow(*row, *initial) for row in rows]


def best_checkpoint(run_id: str) -> Select[str]:
    """Select the URI of the checkpoint of the run's best step, if there is one."""
    of_best = (RunTable.run_id == CheckpointTable.run_id) & (RunTable.best_step == CheckpointTable.step)
    return select(CheckpointTable.uri).join(RunTable, of_best).where(RunTable.run_id == run_id)
