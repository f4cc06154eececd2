"""Other messages that a turn's tokens made for retries with other options, stored in the row's answer."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from adapter.conversation import Message, message_from_json
from store.arrays import pack_json, unpack_json
from store.schema import TurnTable

_MOST = 16
"""Views of one turn. A client that asks for more finds the oldest ones unknown after a restart."""


async def store_view(conn: AsyncConnection, turn_id: int, view: Message) -> None:
    """Add a view to a completed turn, if it is not there yet."""
    row = TurnTable.id == turn_id
    packed = await conn.scalar(select(TurnTable.answer).where(row).with_for_update())
    answer = None if packed is None else unpack_json(packed)
    if not isinstance(answer, dict):
        return
    stored = answer["message"].get("views", [])
    value = view.for_template()
    if value not in stored:
        answer["message"]["views"] = [*stored, value][-_MOST:]
        await conn.execute(update(TurnTable).where(row).values(answer=pack_json(answer)))


def views_of(answer: Mapping[str, Any]) -> list[Message]:
    return [message_from_json(one) for one in answer["message"].get("views", [])]
