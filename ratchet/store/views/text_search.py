"""Search in what agents and models said.

Conversations are compressed in rows of turns, so Postgres cannot index their words without a second copy of the text.
A search therefore reads turns, newest first, for a bounded time, and says how far it came; the next page goes on there.
"""

import asyncio
import time
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.arrays import unpack_text
from ratchet.store.schema import RolloutTable, TurnTable

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
            if data and (excerpt := _excerpt(unpack_text(data), words)):
                hits.append(TextHit(rollout_id, turn_id, said_by, excerpt))
                break
    return hits


def _excerpt(text: str, words: str) -> str:
    """Return the text around the first place, with the escapes of JSON strings read; empty if it is not there."""
    plain = text.replace("\\n", "\n").replace('\\"', '"').replace("\\t", "\t").replace("\\\\", "\\")
    at = plain.lower().find(words.lower())
    if at < 0:
        return ""
    start = max(0, at - _EXCERPT_CHARS // 2)
    end = min(len(plain), at + len(words) + _EXCERPT_CHARS // 2)
    return ("…" if start else "") + plain[start:end] + ("…" if end < len(plain) else "")
