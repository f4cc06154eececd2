"""Numbers of a step, by name.

Why here: one file per aggregate; learner and weight sync write, curves and TensorBoard read.
Called by: `training/learner_commits.py`, `engine/weight_update.py`, `activities/learning.py`.
"""

from collections.abc import Mapping

from sqlalchemy import func
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.schema import MetricTable


async def record_metrics(
    connection: AsyncConnection, run_id: str, step: int, values: Mapping[str, float], keep_highest: bool = False
) -> None:
    """Again overwrites; `keep_highest`: one number stands for several engines, the worst of them."""
    rows = [{"run_id": run_id, "step": step, "name": name, "value": value} for name, value in values.items()]
    statement = insert(MetricTable).values(rows)
    value = func.greatest(MetricTable.value, statement.excluded.value) if keep_highest else statement.excluded.value
    await connection.execute(
        statement.on_conflict_do_update(index_elements=["run_id", "step", "name"], set_={"value": value})
    )
