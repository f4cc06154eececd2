"""The tables that the result of runs rests on, as Parquet files that `verify.py` beside them recomputes it from.

`tables/<table>.parquet` has the rows of these runs. What only shows a conversation is left out: pages show it.
"""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.types import OPEN_STATES
from reads import verify_published
from store import retention
from store.parquet_tables import arrow_table
from store.schema import (
    BatchItemTable,
    BatchTable,
    ChainSpanTable,
    ChainTable,
    EvaluationTable,
    GradeTable,
    PolicyVersionTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    TrainedTurnTable,
    TurnTable,
)

_OF_RUN = (RunTable, RolloutGroupTable, RolloutTable, BatchTable, BatchItemTable, EvaluationTable, PolicyVersionTable)
_OF_ROLLOUT = (GradeTable, ChainTable, TurnTable, TrainedTurnTable)
_LEFT_OUT = {"request", "answer", "routed_experts", "log"}
_ROWS_AT_ONCE = 500


def _statements(run_ids: Sequence[str]) -> dict[str, Select[Any]]:
    """Return table → its published rows."""
    rollouts = select(RolloutTable.id).where(RolloutTable.run_id.in_(run_ids))
    of_run = {table: table.run_id.in_(run_ids) for table in _OF_RUN}
    of_rollout = {table: table.rollout_id.in_(rollouts) for table in _OF_ROLLOUT}
    chains = select(ChainTable.id).where(ChainTable.rollout_id.in_(rollouts))
    found: dict[Any, Any] = of_run | of_rollout | {ChainSpanTable: ChainSpanTable.chain_id.in_(chains)}
    return {
        table.__tablename__: select(*(one for one in table.__table__.columns if one.name not in _LEFT_OUT)).where(rows)
        for table, rows in found.items()
    }


async def write_publication(connection: AsyncConnection, run_ids: Sequence[str], out: Path) -> dict[str, int]:
    """Write tables, configs and `verify.py` to `out`; return table → rows. A run that trains on the stored groups of
    another one is published with that one.

    Raises ConfigError if a run is open, or its turns have been moved to its archive.
    """
    sources = select(RolloutGroupTable.run_id).join(BatchItemTable, BatchItemTable.group_id == RolloutGroupTable.id)
    sources = sources.where(BatchItemTable.run_id.in_(run_ids)).distinct()
    run_ids = [*run_ids, *(await connection.execute(sources)).scalars()]
    runs = list(await connection.execute(select(RunTable.__table__).where(RunTable.run_id.in_(run_ids))))
    for run in runs:
        if run.state in OPEN_STATES:
            raise ConfigError(f"{run.run_id} is {run.state}; publish it once it has ended")
        await retention.require_turns(connection, run.run_id)
    (out / "tables").mkdir(parents=True)
    for run in runs:
        (out / f"{run.run_id}.yaml").write_text(yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True))
    counts: dict[str, int] = {}
    for name, statement in _statements(run_ids).items():
        columns = list(statement.selected_columns)
        counts[name] = 0
        schema, path = arrow_table(columns, []).schema, out / "tables" / f"{name}.parquet"
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            async for rows in (await connection.stream(statement)).mappings().partitions(_ROWS_AT_ONCE):
                await asyncio.to_thread(writer.write_table, arrow_table(columns, rows))
                counts[name] += len(rows)
    shutil.copyfile(verify_published.__file__, out / "verify.py")
    return counts
