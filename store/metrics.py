"""Metrics of a step, by name; the learner and the weight updates write them, curves and TensorBoard read them."""

from collections.abc import Collection, Mapping

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema import MetricTable


async def record_metrics(
    connection: AsyncConnection, run_id: str, step: int, values: Mapping[str, float], keep_highest: bool = False
) -> None:
    """Store the values; `keep_highest`: the larger ones, of metrics of which the worst of several engines counts."""
    rows = [{"run_id": run_id, "step": step, "name": name, "value": value} for name, value in values.items()]
    statement = insert(MetricTable).values(rows)
    value = func.greatest(MetricTable.value, statement.excluded.value) if keep_highest else statement.excluded.value
    await connection.execute(
        statement.on_conflict_do_update(index_elements=["run_id", "step", "name"], set_={"value": value})
    )


async def read_metric(connection: AsyncConnection, run_id: str, step: int, name: str) -> float | None:
    """Return one metric of one step, None if it was not recorded."""
    return (await read_metric_values(connection, run_id, [step], name)).get(step)


async def read_metric_values(
    connection: AsyncConnection, run_id: str, steps: Collection[int], name: str
) -> dict[int, float]:
    """Return step → value of one metric; a step without it is missing."""
    statement = select(MetricTable.step, MetricTable.value).where(
        MetricTable.run_id == run_id, MetricTable.step.in_(steps), MetricTable.name == name
    )
    return {step: value for step, value in await connection.execute(statement)}
