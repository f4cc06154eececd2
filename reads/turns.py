"""The contents of turns: messages as they were sent and answered, and windows of a chain's tokens."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import JsonObject
from store.arrays import ids_from_bytes, logprobs_from_bytes, unpack_json
from store.chains import steps_of_spans
from store.schema import ChainSpanTable, ChainTable, TurnTable
from store.tool_uses import object_of


@dataclass(slots=True, frozen=True)
class TurnFields:
    """The fields of a turn with and without its contents; `TurnTable` describes the columns."""

    id: int
    attempt: int
    lane: str
    kind: str
    state: str
    fork_cause: str | None
    prompt_tokens: int
    num_sampled: int
    finish_reason: str | None
    unread_call: str | None


@dataclass(slots=True, frozen=True)
class TurnContent(TurnFields):
    """A turn with its new messages and its answer.

    `messages`: what the request added behind the answer of turn `after`; the whole history if `after` is None.
    `answer`: None while the call is in flight, and if it was aborted.
    """

    created_at: datetime
    completed_at: datetime | None
    after: int | None
    system: str
    num_tools: int
    messages: list[JsonObject]
    answer: JsonObject | None


@dataclass(slots=True, frozen=True)
class ChainToken:
    """One token of a chain. `logprob` and `policy_step` are None for context; `logprob` is the recorded one."""

    position: int
    id: int
    sampled: bool
    trained: bool
    logprob: float | None
    policy_step: int | None
    turn_id: int


_CONTENT = [getattr(TurnTable, name) for name in (*TurnContent.__match_args__, "request") if hasattr(TurnTable, name)]
"""The columns that a turn's content is read from."""


async def read_turn_contents(
    connection: AsyncConnection, rollout_id: int, limit: int, after: int = 0
) -> list[TurnContent]:
    """Return the next `limit` turns of the rollout behind the turn `after`."""
    statement = select(*_CONTENT).where(TurnTable.rollout_id == rollout_id, TurnTable.id > after)
    rows = await connection.execute(statement.order_by(TurnTable.id).limit(limit))
    return [_content(row) for row in rows]


async def read_turns(connection: AsyncConnection, turn_ids: Collection[int]) -> dict[int, TurnContent]:
    rows = await connection.execute(select(*_CONTENT).where(TurnTable.id.in_(turn_ids)))
    return {row.id: _content(row) for row in rows}


def _content(row: Any) -> TurnContent:
    values = dict(row._mapping)
    request = values.pop("request")
    answer = values.pop("answer")
    sent = object_of(unpack_json(request)) if request else {}
    message = object_of(unpack_json(answer)).get("message") if answer else None
    return TurnContent(
        **values,
        after=sent.get("after"),
        system=str(sent.get("system") or ""),
        num_tools=len(sent.get("tools") or ()),
        messages=list(sent.get("messages") or ()),
        answer=None if message is None else object_of(message),
    )


async def chain_length(connection: AsyncConnection, rollout_id: int, chain_no: int) -> int | None:
    statement = select(ChainTable.num_tokens).where(ChainTable.rollout_id == rollout_id, ChainTable.no == chain_no)
    return (await connection.execute(statement)).scalar_one_or_none()


async def turns_in_chains(connection: AsyncConnection, rollout_id: int) -> list[int]:
    """Return the turns whose sampled tokens are in a chain of the rollout; aborted ones, for example, are in none."""
    statement = (
        select(ChainSpanTable.turn_id)
        .join(ChainTable, ChainTable.id == ChainSpanTable.chain_id)
        .where(ChainTable.rollout_id == rollout_id, ChainSpanTable.sampled)
        .distinct()
    )
    return sorted((await connection.execute(statement)).scalars())


async def first_position_of_turn(connection: AsyncConnection, rollout_id: int, turn_id: int) -> tuple[int, int] | None:
    """Return the chain's number and the position of the first token that the turn sampled; None if no chain has it."""
    statement = (
        select(ChainTable.no, ChainSpanTable.start)
        .join(ChainSpanTable, ChainSpanTable.chain_id == ChainTable.id)
        .where(ChainTable.rollout_id == rollout_id, ChainSpanTable.turn_id == turn_id, ChainSpanTable.sampled)
        .order_by(ChainTable.no)
        .limit(1)
    )
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else (row[0], row[1])


async def read_token_window(
    connection: AsyncConnection, rollout_id: int, chain_no: int, first: int, length: int
) -> list[ChainToken]:
    """Return the tokens [first, first + length) of a chain; only the turns in this window are read."""
    end = ChainSpanTable.start + ChainSpanTable.length
    spans = (
        await connection.execute(
            select(ChainSpanTable, TurnTable.version_spans, TurnTable.num_sampled)
            .join(ChainTable, ChainTable.id == ChainSpanTable.chain_id)
            .join(TurnTable, TurnTable.id == ChainSpanTable.turn_id)
            .where(
                ChainTable.rollout_id == rollout_id,
                ChainTable.no == chain_no,
                ChainSpanTable.start < first + length,
                end > first,
            )
            .order_by(ChainSpanTable.no)
        )
    ).all()
    turn_ids = {span.turn_id for span in spans}
    columns = (TurnTable.id, TurnTable.suffix_ids, TurnTable.sampled_ids, TurnTable.logprobs)
    rows = await connection.execute(select(*columns).where(TurnTable.id.in_(turn_ids)))
    turns = {row.id: row for row in rows}
    tokens: list[ChainToken] = []
    for span in spans:
        turn = turns[span.turn_id]
        low = max(first, span.start) - span.start
        high = min(first + length, span.start + span.length) - span.start
        source = slice(span.source_start + low, span.source_start + high)
        ids = ids_from_bytes(turn.sampled_ids if span.sampled else turn.suffix_ids)[source].tolist()
        logprobs: list[float] | None = None
        steps: list[int] = []
        if span.sampled:
            logprobs = logprobs_from_bytes(turn.logprobs)[source].tolist() if turn.logprobs else None
            steps = steps_of_spans(span.version_spans, span.num_sampled)[source].tolist()
        for at, token in enumerate(ids):
            tokens.append(
                ChainToken(
                    position=span.start + low + at,
                    id=token,
                    sampled=span.sampled,
                    trained=span.sampled and span.trained,
                    logprob=logprobs[at] if logprobs else None,
                    policy_step=steps[at] if span.sampled and steps[at] >= 0 else None,
                    turn_id=span.turn_id,
                )
            )
    return tokens
