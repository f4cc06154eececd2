"""Turns of a rollout's earlier attempts, and their move to the session of the attempt that asks for them again."""

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import case, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from ratchet.types import SessionState, TurnState
from store.columns import columns_of
from store.schema import PatchTable, SessionTable, TurnTable

COPIED = "copied"
"""The worker of turns that were sampled for another rollout (`store/forks.py`)."""


class RecordedTurn(NamedTuple):
    """A completed turn of an earlier attempt, with its packed request and answer. `is_replayed`: sampled for an attempt
    before that one; a copy is not. `asked_at`, `answered_at`: in that attempt, the latter None in a replay."""

    id: int
    lane: str
    kind: str
    request: bytes
    answer: bytes
    is_replayed: bool
    asked_at: datetime
    answered_at: datetime | None


async def load_recorded(conn: AsyncConnection, rollout_id: int, attempt: int) -> list[RecordedTurn]:
    """Return the completed turns of the attempts before this one that have no patch, the newest attempt's first."""
    is_replayed = TurnTable.replayed_at.is_not(None) & (TurnTable.worker != COPIED)
    asked_at = func.coalesce(TurnTable.replayed_at, TurnTable.created_at)
    answered_at = case((TurnTable.replayed_at.is_(None), TurnTable.completed_at))
    columns = columns_of(RecordedTurn, TurnTable, is_replayed=is_replayed, asked_at=asked_at, answered_at=answered_at)
    completed = (TurnTable.rollout_id == rollout_id) & (TurnTable.state == TurnState.COMPLETED)
    has_patch = exists().where(PatchTable.rollout_id == rollout_id, PatchTable.attempt == TurnTable.attempt)
    statement = select(*columns).where(completed, TurnTable.attempt < attempt, ~has_patch)
    rows = await conn.execute(statement.order_by(TurnTable.attempt.desc(), TurnTable.id))
    return [RecordedTurn(*row) for row in rows]


async def move_turn(
    conn: AsyncConnection, turn_id: int, session_id: int, attempt: int, digest: bytes, request: bytes, answer: bytes
) -> bool:
    """Move a turn of an earlier attempt to this session, to which it is not delivered yet.

    False if it has been moved already, its own session or the new one is not in the state for it, the new one lacks
    the turn that its tokens begin with, or has a call with this digest.
    """
    opened = select(SessionTable.id).where(SessionTable.id == session_id, SessionTable.state == SessionState.OPEN)
    if (await conn.execute(opened.with_for_update(read=True))).scalar_one_or_none() is None:
        return False
    same, parent = aliased(TurnTable), aliased(TurnTable)
    of_session = parent.session_id == session_id
    statement = update(TurnTable).where(
        TurnTable.id == turn_id,
        TurnTable.attempt < attempt,
        TurnTable.state == TurnState.COMPLETED,
        exists().where(SessionTable.id == TurnTable.session_id, SessionTable.state == SessionState.CLOSED),
        TurnTable.parent_turn_id.is_(None) | exists().where(parent.id == TurnTable.parent_turn_id, of_session),
        ~exists().where(same.session_id == session_id, same.lane == TurnTable.lane, same.digest == digest),
    )
    values = {"session_id": session_id, "attempt": attempt, "digest": digest, "ordinal": 0, "delivered": False}
    values |= {"request": request, "answer": answer, "lease_owner": None, "replayed_at": func.now()}
    return bool((await conn.execute(statement.values(values))).rowcount)
