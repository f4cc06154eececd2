"""Search in what agents and models said.

Conversations are compressed in rows of turns, so Postgres cannot index their words without a second copy of the text.
A search therefore reads turns, newest first, for a bounded time, and says how far it came; the next page goes on there.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.arrays import unpack_json
from ratchet.store.schema import RolloutTable, TurnTable
from ratchet.types import JsonObject

_PAGE_ROLLOUTS = 50
_EXCERPT_CHARS = 120


@dataclass(slots=True, frozen=True)
class TextHit:
    """A turn that contains the words. `said_by`: "agent" if they are in its new messages, else "model"."""

    rollout_id: int
    turn_id: int
    said_by: str
    excerpt: str


@dataclass(slots=True, frozen=True)
class TextSearch:
    """Result of one search. `next_before`: rollout id from which the search goes on; None if it is complete."""

    hits: list[TextHit]
    num_turns: int
    next_before: int | None


async def search_run(
    connection: AsyncConnection, run_id: str, words: str, before: int | None, max_hits: int, seconds: float
) -> TextSearch:
    """Search the run's turns for a text, without regard to case, in at most about `seconds`."""
    deadline = time.monotonic() + seconds
    hits: list[TextHit] = []
    number = 0
    while True:
        ids = select(RolloutTable.id).where(RolloutTable.run_id == run_id).order_by(RolloutTable.id.desc())
        if before is not None:
            ids = ids.where(RolloutTable.id < before)
        page = list((await connection.execute(ids.limit(_PAGE_ROLLOUTS))).scalars())
        if not page:
            return TextSearch(hits, number, None)
        for rollout_id in page:
            columns = (TurnTable.id, TurnTable.request, TurnTable.answer)
            statement = select(*columns).where(TurnTable.rollout_id == rollout_id).order_by(TurnTable.id)
            rows = (await connection.execute(statement)).all()
            number += len(rows)
            hits += await asyncio.to_thread(
                _find, rollout_id, [(row.id, row.request, row.answer) for row in rows], words
            )
            before = rollout_id
            if len(hits) >= max_hits or time.monotonic() > deadline:
                return TextSearch(hits, number, before)


def _find(rollout_id: int, rows: list[tuple[int, bytes, bytes | None]], words: str) -> list[TextHit]:
    hits = []
    for turn_id, request, answer in rows:
        for said_by, data in (("agent", request), ("model", answer)):
            if data and (excerpt := _excerpt(unpack_json(data), words)):  # type: ignore[arg-type]
                hits.append(TextHit(rollout_id, turn_id, said_by, excerpt))
                break
    return hits


def _excerpt(stored: JsonObject, words: str) -> str:
    """Return the text around the first place in which a request or an answer says the words; empty without one."""
    for text in _said(stored):
        at = text.lower().find(words.lower())
        if at >= 0:
            start = max(0, at - _EXCERPT_CHARS // 2)
            end = min(len(text), at + len(words) + _EXCERPT_CHARS // 2)
            return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
    return ""


def _said(stored: JsonObject) -> Iterator[str]:
    """Yield the system text, and what messages say; roles, ids and names of fields are in every turn."""
    yield from _strings(stored.get("system"))
    for message in stored.get("messages") or [stored.get("message") or {}]:
        content = message.get("content")
        yield from _strings([part.get("text") for part in content] if isinstance(content, list) else content)
        yield from _strings(message.get("reasoning_content"))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            yield from _strings([function.get("name"), function.get("arguments")])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)
