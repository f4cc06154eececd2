"""The words of conversations: the index of the full-text search.

Conversations are compressed in rows of turns, so Postgres cannot index them itself. The sweep writes the distinct words
of each ended rollout into `rollout_words`, in small transactions beside the work, and sets `rollout.has_words`. A
rollout that is still open, or that no sweep has reached, has no words there; a search reads its turns instead.

A word is a run of letters and digits in lower case; the index has the first 40 characters of it.
"""

import asyncio
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import structlog
import zstandard
from sqlalchemy import Text, cast, func, select, update
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import JsonObject
from store.arrays import unpack_json
from store.database import Database
from store.rollouts import run_of_rollout
from store.schema import RolloutTable, RolloutWordsTable, TurnTable

_LOG = structlog.get_logger()
_WORD = re.compile(r"[^\W_]+")
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+")
"""A part of a name such as ValueError, so that a search for `error` finds it."""
_UNSPACED = re.compile("[\u0e00-\u0eff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
"""Scripts that put no spaces between words; a text in one is searched in the turns, not in the index."""
_WORD_CHARS = 40
_MAX_WORD_BYTES = 500_000
"""The largest size of one rollout's words; Postgres holds 1 MiB in a tsvector."""
_BATCH_ROLLOUTS = 50
UNREADABLE = (zstandard.ZstdError, ValueError)
"""Errors of `unpack_json` for a damaged row."""


def texts_of(stored: JsonObject) -> Iterator[str]:
    """Yield a request's or answer's system text and messages, without roles, ids and names, which are everywhere."""
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


def words_of(texts: Iterable[str]) -> list[str]:
    """Return the distinct words of the texts as the index has them."""
    words: set[str] = set()
    for text in texts:
        words.update(word[:_WORD_CHARS] for word in _WORD.findall(text.lower()))
        names = [word for word in set(_WORD.findall(text)) if word.isascii() and word.lower() != word != word.upper()]
        words.update(part.lower()[:_WORD_CHARS] for name in names for part in _PART.findall(name))
    return sorted(words)


def search_query(run_id: str | None, text: str) -> str | None:
    """Return the tsquery for the rollouts of a run, or of all runs, that have all words of the text; None if the index
    has no such words.

    The last word may be the beginning of a longer one.
    """
    words = [word[:_WORD_CHARS] for word in _WORD.findall(text.lower())]
    if not words or _UNSPACED.search(text):
        return None
    lexemes = [_quoted(one) for one in ([] if run_id is None else [run_lexeme(run_id)]) + words]
    return " & ".join(lexemes) + ":*"


def run_lexeme(run_id: str) -> str:
    """Return what stands for the run among its rollouts' words, with a colon as no word has, for the index."""
    return f"run:{run_id}"


def _quoted(lexeme: str) -> str:
    return "'" + lexeme.replace("\\", "\\\\").replace("'", "''") + "'"


async def index_rollouts(database: Database, max_seconds: float) -> int:
    """Write the words of ended rollouts that have none yet, for about `max_seconds`; return how many rollouts.

    A process that dies leaves whole rollouts: words and `has_words` are written in one transaction. Two processes that
    index the same rollout write the same row.
    """
    end = time.monotonic() + max_seconds
    number = 0
    while time.monotonic() < end:
        batch = await database.run(_rollouts_to_index)
        for rollout_id in batch:
            try:
                await _index_rollout(database, rollout_id)
            except DBAPIError as error:  # what this rollout says cannot be written, and must not keep others waiting
                _LOG.error("rollout cannot be indexed", rollout=rollout_id, error=str(error.orig))
                await database.run(_mark_indexed, rollout_id)
            number += 1
            if time.monotonic() >= end:
                break
        if len(batch) < _BATCH_ROLLOUTS:
            break
    return number


async def _rollouts_to_index(connection: AsyncConnection) -> list[int]:
    statement = (
        select(RolloutTable.id)
        .where(~RolloutTable.has_words, RolloutTable.outcome.is_not(None))
        .order_by(RolloutTable.run_id.desc(), RolloutTable.id.desc())  # the index, backwards: new ones first
        .limit(_BATCH_ROLLOUTS)
    )
    return list((await connection.execute(statement)).scalars())


async def _index_rollout(database: Database, rollout_id: int) -> None:
    async with database.begin() as connection:
        run_id = await run_of_rollout(connection, rollout_id)
        statement = select(TurnTable.id, TurnTable.request, TurnTable.answer).where(TurnTable.rollout_id == rollout_id)
        rows = [(row.id, (row.request, row.answer)) for row in await connection.execute(statement)]
    words = await asyncio.to_thread(_words_of_turns, rollout_id, rows)
    async with database.begin() as connection:
        if words:
            vector = func.array_to_tsvector(cast([run_lexeme(run_id), *words], ARRAY(Text)))
            inserting = insert(RolloutWordsTable).values(rollout_id=rollout_id, words=vector)
            await connection.execute(inserting.on_conflict_do_nothing())
        await _mark_indexed(connection, rollout_id)


async def _mark_indexed(connection: AsyncConnection, rollout_id: int) -> None:
    done = update(RolloutTable).where(RolloutTable.id == rollout_id, ~RolloutTable.has_words)
    await connection.execute(done.values(has_words=True))


def _words_of_turns(rollout_id: int, rows: Sequence[tuple[int, tuple[bytes | None, ...]]]) -> list[str]:
    words: set[str] = set()
    for turn_id, parts in rows:
        for data in parts:
            try:
                words.update(words_of(texts_of(unpack_json(data))) if data else ())  # type: ignore[arg-type]
            except UNREADABLE as error:
                _LOG.error("turn cannot be read and is not indexed", rollout=rollout_id, turn=turn_id, error=str(error))
    size = 0
    kept = []
    for word in sorted(words, key=lambda word: (len(word), word)):  # what has too many are hashes and the like
        size += len(word.encode())
        if size > _MAX_WORD_BYTES:
            _LOG.warning("rollout has too many words for the index", rollout=rollout_id, words=len(words))
            break
        kept.append(word)
    return kept
