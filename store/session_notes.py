"""The adapter's notes about a session beside its turns: template, refused calls, an endpoint that is away."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import cast, func, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import SessionState
from store.schema import RolloutTable, SessionTable

_MAX_REFUSAL_CHARS = 300


async def note_template(conn: AsyncConnection, rollout_id: int, digest: str, kwargs: Mapping[str, Any]) -> None:
    """Record in the rollout's provenance the chat template that its prompts are rendered with; the newest one stays."""
    noted = {"template_digest": digest, "chat_template_kwargs": dict(kwargs)}
    differs = RolloutTable.provenance["template_digest"].astext.is_distinct_from(digest)
    statement = update(RolloutTable).where(RolloutTable.id == rollout_id, differs)
    await conn.execute(statement.values(provenance=RolloutTable.provenance.concat(cast(noted, JSONB))))


async def note_refusal(conn: AsyncConnection, session_id: int, reason: str) -> None:
    """Record that a call of the session was refused for what it contained, and why; the first time stays."""
    statement = update(SessionTable).where(SessionTable.id == session_id, SessionTable.refusal.is_(None))
    await conn.execute(statement.values(refusal=reason[:_MAX_REFUSAL_CHARS]))


async def note_endpoint_error(conn: AsyncConnection, session_id: int, reason: str | None) -> None:
    """Record why the session's endpoint did not answer the last call; None: it did."""
    differs = SessionTable.endpoint_error.is_distinct_from(reason)
    statement = update(SessionTable).where(SessionTable.id == session_id, differs)
    await conn.execute(statement.values(endpoint_error=reason))


class EndpointErrors(NamedTuple):
    """The number of open sessions that wait for their endpoint, and the reason of one of them."""

    num_waiting: int
    reason: str


async def endpoint_errors(conn: AsyncConnection, run_id: str) -> EndpointErrors | None:
    """Return what the run's open sessions wait for; None if none waits for an endpoint."""
    statement = (
        select(func.count(), func.max(SessionTable.endpoint_error))
        .join(RolloutTable, RolloutTable.id == SessionTable.rollout_id)
        .where(
            RolloutTable.run_id == run_id,
            RolloutTable.outcome.is_(None),
            SessionTable.state == SessionState.OPEN,
            SessionTable.endpoint_error.is_not(None),
        )
    )
    count, reason = (await conn.execute(statement)).one()
    return EndpointErrors(count, reason or "") if count else None
