"""A session's completed turns with their tokens, from which an adapter rebuilds the session's turn tree."""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import TurnState
from store.columns import columns_of
from store.schema import TurnTable


@dataclass(frozen=True, slots=True)
class TreeTurn:
    """A completed turn with its ids and messages, from which the adapter continues a conversation."""

    id: int
    parent_turn_id: int | None
    kept_tokens: int
    suffix_ids: bytes
    sampled_ids: bytes
    finish_reason: str | None
    lane: str
    kind: str
    request: bytes
    answer: bytes


async def load_tree(conn: AsyncConnection, session_id: int, known_ids: Collection[int] = ()) -> list[TreeTurn]:
    """Return the session's completed turns except `known_ids`, parents before children, with token arrays and texts."""
    where = (
        (TurnTable.session_id == session_id) & (TurnTable.state == TurnState.COMPLETED) & TurnTable.id.not_in(known_ids)
    )
    rows = await conn.execute(select(*columns_of(TreeTurn, TurnTable)).where(where).order_by(TurnTable.id))
    return [TreeTurn(*row) for row in rows]
