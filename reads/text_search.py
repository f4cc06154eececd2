"""Search in what agents and models said.

The index of words (`store.rollout_words`) names the rollouts that have all words of a text; the turns of these
are read for the text itself. So are the turns of rollouts without words in the index: open ones, and those that no
sweep has reached. A search lasts for a bounded time and says how far it came; the next page goes on there.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import ColumnElement, cast, func, literal, select, text, true
from sqlalchemy.dialects.postgresql import TSQUERY
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import JsonObject
from store.arrays import unpack_json
from store.rollout_words import UNREADABLE, search_query, texts_of
from store.schema import RolloutTable, RolloutWordsTable, TurnTable

_PAGE_ROLLOUTS = 50
_EXCERPT_CHARS = 120
_SCANNING = text("SELECT set_config('enable_seqscan', :value, true)")
MAX_COUNTED = 10_000
"""Rollouts that are not indexed are counted up to one more than this."""


@dataclass(slots=True, frozen=True)
class TextHit:
    """A turn that contains the text. `said_by`: "agent" if it is in its new messages, else "model"."""

    run_id: str
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


async def count_rollouts_without_words(connection: AsyncConnection, run_id: str | None) -> int:
    """Return how many rollouts of the run, or of all runs, are not in the index, at most `MAX_COUNTED` + 1."""
    counted = select(literal(1)).where(~RolloutTable.has_words, _of_run(run_id)).limit(MAX_COUNTED + 1).subquery()
    async with _without_scans(connection):
        return int((await connection.execute(select(func.count()).select_from(counted))).scalar_one())


async def search_run(
    connection: AsyncConnection, run_id: str | None, words: str, before: int | None, max_hits: int, seconds: float
) -> TextSearch:
    """Search the turns of a run, or of all runs, for a text, without regard to case, in at most about `seconds`.

    In the index the text's last word may be the beginning of a longer one, and the other words are whole. A text
    without any word is looked for in every turn.
    """
    deadline = time.monotonic() + seconds
    hits: list[TextHit] = []
    number = 0
    while True:
        page = await _candidates(connection, run_id, words, before)
        if not page:
            return TextSearch(hits, number, None)
        runs = select(RolloutTable.id, RolloutTable.run_id).where(RolloutTable.id.in_(page))
        run_of = {row.id: row.run_id for row in await connection.execute(runs)}
        for rollout_id in page:
            columns = (TurnTable.id, TurnTable.request, TurnTable.answer)
            statement = select(*columns).where(TurnTable.rollout_id == rollout_id).order_by(TurnTable.id)
            rows = (await connection.execute(statement)).all()
            number += len(rows)
            turns = [(row.id, row.request, row.answer) for row in rows]
            hits += await asyncio.to_thread(_find, run_of[rollout_id], rollout_id, turns, words)
            before = rollout_id
            if len(hits) >= max_hits or time.monotonic() > deadline:
                return TextSearch(hits, number, before)


def _of_run(run_id: str | None) -> ColumnElement[bool]:
    return true() if run_id is None else RolloutTable.run_id == run_id


@asynccontextmanager
async def _without_scans(connection: AsyncConnection) -> AsyncIterator[None]:
    """Let Postgres use an index in these statements, even if it believes that most rows match."""
    await connection.execute(_SCANNING, {"value": "off"})
    yield
    await connection.execute(_SCANNING, {"value": "on"})


async def _candidates(connection: AsyncConnection, run_id: str | None, words: str, before: int | None) -> list[int]:
    """Return the next rollouts of the run, or of all runs, whose turns may say the words, newest first."""
    query = search_query(run_id, words)
    # Of all runs, the rollouts without words are in no index in the order of their ids; they are sorted.
    number = RolloutTable.id + 0 if run_id is None and query is not None else RolloutTable.id
    every = select(RolloutTable.id).where(_of_run(run_id)).order_by(number.desc()).limit(_PAGE_ROLLOUTS)
    if before is not None:
        every = every.where(number < before)
    if query is None:
        return list((await connection.execute(every)).scalars())
    async with _without_scans(connection):
        unindexed = list((await connection.execute(every.where(~RolloutTable.has_words))).scalars())
        indexed = await _indexed(connection, query, before)
    return sorted({*unindexed, *indexed}, reverse=True)[:_PAGE_ROLLOUTS]


async def _indexed(connection: AsyncConnection, query: str, before: int | None) -> list[int]:
    """Return the newest rollouts with the words, found by the index of words.

    Postgres cannot estimate the beginning of a word and would rather read every row in the order of the ids, or all of
    them. Each such row is unpacked, so these plans are far slower than they seem to it.
    """
    number = RolloutWordsTable.rollout_id + 0  # an expression, which no index has in order
    statement = select(RolloutWordsTable.rollout_id).where(
        RolloutWordsTable.words.op("@@", is_comparison=True)(cast(literal(query), TSQUERY))
    )
    if before is not None:
        statement = statement.where(number < before)
    return list((await connection.execute(statement.order_by(number.desc()).limit(_PAGE_ROLLOUTS))).scalars())


def _find(run_id: str, rollout_id: int, rows: list[tuple[int, bytes, bytes | None]], words: str) -> list[TextHit]:
    hits = []
    for turn_id, request, answer in rows:
        for said_by, data in (("agent", request), ("model", answer)):
            try:
                excerpt = _excerpt(unpack_json(data), words) if data else ""  # type: ignore[arg-type]
            except UNREADABLE:  # the sweep logs damaged turns
                continue
            if excerpt:
                hits.append(TextHit(run_id, rollout_id, turn_id, said_by, excerpt))
                break
    return hits


def _excerpt(stored: JsonObject, words: str) -> str:
    """Return the text around the first place in which a request or an answer says the words; empty without one."""
    for said in texts_of(stored):
        at = said.lower().find(words.lower())
        if at >= 0:
            start = max(0, at - _EXCERPT_CHARS // 2)
            end = min(len(said), at + len(words) + _EXCERPT_CHARS // 2)
            return ("…" if start else "") + said[start:end] + ("…" if end < len(said) else "")
    return ""
