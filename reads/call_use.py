"""The number of the engines' model calls in flight over time, and of the tokens that they sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_CALLS = text(
    """
    WITH given AS (SELECT CAST(:start AS float8) AS start, CAST(:width AS float8) AS width, CAST(:last AS int) AS last),
    calls AS (
      SELECT extract(epoch FROM created_at) - start AS begun, extract(epoch FROM completed_at) - start AS ended,
        num_sampled, width, last
      FROM turn, given WHERE rollout_id = ANY(CAST(:rollouts AS bigint[])) AND completed_at IS NOT NULL)
    SELECT part, sum(greatest(0, least(ended, (part + 1) * width) - greatest(begun, part * width))),
      sum(num_sampled) FILTER (WHERE part = floor(ended / width))
    FROM calls, generate_series(
      CAST(greatest(0, floor(begun / width)) AS int), CAST(least(last, floor(ended / width)) AS int)) part
    GROUP BY part
    """
)


@dataclass(slots=True, frozen=True)
class CallUse:
    """Part `part` of a stretch of time: the calls' seconds in it, and the tokens of the calls that ended in it."""

    part: int
    call_seconds: float
    num_sampled: int


async def read_call_use(
    connection: AsyncConnection, rollout_ids: Sequence[int], start: float, end: float, num_parts: int
) -> list[CallUse]:
    """Return the model calls of these rollouts by equal parts of [start, end), which are seconds since the epoch."""
    values = {"rollouts": list(rollout_ids), "start": start, "width": (end - start) / num_parts, "last": num_parts - 1}
    rows = await connection.execute(_CALLS, values)
    return [CallUse(row[0], float(row[1] or 0.0), int(row[2] or 0)) for row in rows]
