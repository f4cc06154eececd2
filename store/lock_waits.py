"""The holders of locks that other statements wait for: a forgotten transaction, an index that is being built."""

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.durations import duration_in_words

LONG_SECONDS = 5.0
"""A wait that lasts longer explains why nothing moves; no statement of ours waits so long by itself."""
_LONGEST = text("""
    SELECT holder.pid, holder.application_name, holder.state, left(holder.query, 120) AS query,
           count(*) AS num_waiting, extract(epoch FROM now() - min(waiter.query_start)) AS seconds
    FROM pg_stat_activity AS waiter
    CROSS JOIN LATERAL unnest(pg_blocking_pids(waiter.pid)) AS blocking(pid)
    JOIN pg_stat_activity AS holder ON holder.pid = blocking.pid
    WHERE waiter.wait_event_type = 'Lock' AND waiter.wait_event <> 'virtualxid' AND waiter.datname = current_database()
      AND NOT (holder.wait_event_type IS NOT DISTINCT FROM 'Lock')
    GROUP BY holder.pid, holder.application_name, holder.state, holder.query
    HAVING min(waiter.query_start) < now() - make_interval(secs => :long)
    ORDER BY seconds DESC LIMIT 1
""")


@dataclass(slots=True, frozen=True)
class LockWait:
    """`pid`: the process that holds the lock. `seconds`: how long the oldest of `num_waiting` statements waits."""

    pid: int
    application: str
    state: str
    query: str
    num_waiting: int
    seconds: float

    def sentence(self) -> str:
        by = f" ({self.application})" if self.application else ""
        return (
            f"{self.num_waiting} statements wait, one for {duration_in_words(self.seconds)}, for a lock of process "
            f"{self.pid}{by}, {self.state}: {self.query}; end that transaction, or "
            f"`SELECT pg_terminate_backend({self.pid})`"
        )


async def longest_lock_wait(connection: AsyncConnection, over_seconds: float = LONG_SECONDS) -> LockWait | None:
    """Return the holder of the lock that a statement has waited for longest; None if none waits for that long."""
    row = (await connection.execute(_LONGEST, {"long": over_seconds})).one_or_none()
    if row is None:
        return None
    query = " ".join(row.query.split())
    return LockWait(row.pid, row.application_name, row.state or "unknown", query, row.num_waiting, float(row.seconds))
