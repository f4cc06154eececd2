"""Rows of `turn`: one model call each, inserted before the engine is called, completed before the answer's end is sent.

Turns are opened and completed only by `write_turns`, which locks the session's row; otherwise a turn could be stored
after its session was sealed. `worker`: the adapter process that generates the call; after the process's lease has
expired (`store.adapters`), a retry may take the row over. `lease_owner`: the adapter process with a connected
client of the call, NULL if no client is connected; without meaning after that process's lease has expired.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import orjson
from sqlalchemy import ARRAY, BigInteger, ColumnElement, bindparam, cast, func, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import ForkCause, JsonObject, SessionState, TurnKind, TurnState, UnreadCause
from store.adapters import process_lives
from store.arrays import unpack_json
from store.columns import columns_of, read_one
from store.database import Database
from store.schema import TurnTable

_QUOTED_CHARS = 16
"""A shorter text may be in another lane's request by chance."""


@dataclass(frozen=True, slots=True)
class TurnMeta:
    """A completed turn without its token arrays, as chains are built from it.

    `came_back`: a later request, also one that was never answered, has its answer in the history, or quotes it if it is
    a sub-agent's; set only for a turn whose delivery is not recorded.
    """

    id: int
    parent_turn_id: int | None
    kept_tokens: int
    num_suffix: int
    num_sampled: int
    kind: TurnKind
    fork_cause: ForkCause | None
    delivered: bool
    logprobs_valid: bool
    finish_reason: str | None = None
    lane: str = ""
    came_back: bool = False


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A call before the engine is called."""

    session_id: int
    rollout_id: int
    attempt: int
    lane: str
    digest: bytes
    ordinal: int
    kind: TurnKind
    parent_turn_id: int | None
    kept_tokens: int
    fork_cause: ForkCause | None
    dialect: str
    prompt_tokens: int
    suffix_ids: bytes
    temperature: float
    request: bytes
    engine_id: int | None
    lease_owner: str


@dataclass(frozen=True, slots=True)
class CompletedTurn:
    """The engine's output of a call and the answer for the client."""

    id: int
    session_id: int
    sampled_ids: bytes
    logprobs: bytes
    num_sampled: int
    logprobs_valid: bool
    version_spans: list[JsonObject]
    finish_reason: str
    answer: bytes
    engine_id: int | None
    engine_wait_seconds: float
    routed_experts: bytes | None = None
    unread_call: UnreadCause | None = None


@dataclass(frozen=True, slots=True)
class KnownCall:
    """The newest turn of a digest in its lane. `leased`: its worker lives. `attached`: its client is connected."""

    id: int
    ordinal: int
    state: TurnState
    delivered: bool
    leased: bool
    attached: bool
    lease_owner: str | None
    worker: str
    answer: bytes | None


@dataclass(frozen=True, slots=True)
class WrittenTurns:
    """Result of `write_turns`.

    `opened[i]`: id of the new row; None if the session is closed or the same (digest, ordinal) exists. `completed[i]`:
    False if the turn is not in flight any more: sealed or completed before. `busy`: sessions that another
    transaction has locked; none of their turns was written.
    """

    opened: list[int | None]
    completed: list[bool]
    busy: frozenset[int]


async def write_turns(
    database: Database,
    new: Sequence[NewTurn],
    done: Sequence[CompletedTurn],
    delivered: Sequence[int],
    wait: bool = False,
) -> WrittenTurns:
    """Insert turns as `in_flight`, complete others and record deliveries, of any sessions, in one statement.

    The statement is a transaction of its own. All sessions are locked against seals first. A session that another
    transaction has locked (a seal, or a finalise that builds its chains) is reported as busy without delaying the
    others. With `wait` the lock is waited for; use it for writes of one session only, because two waiting batches could
    deadlock. A row must not be completed and delivered in one call.
    """
    asked = {turn.session_id for turn in new} | {turn.session_id for turn in done}
    if not asked and not delivered:
        return WrittenTurns([], [], frozenset())
    values: list[object] = []
    if asked:
        values.append(list(asked))
    if new:
        values += _columns(_NEW, new)
    if done:
        values += _columns(_DONE, done)
    if delivered:
        values.append(list(delivered))
    locked, opened, completed = set(), {}, set()
    for row in await database.fetch(_written(bool(new), bool(done), bool(delivered), wait), *values):
        match row["part"]:
            case "locked":
                locked.add(row["id"])
            case "opened":
                opened[row["session_id"], row["lane"], row["digest"], row["ordinal"]] = row["id"]
            case "completed":
                completed.add(row["id"])
    busy = frozenset() if wait else frozenset(asked - locked)
    return WrittenTurns([opened.pop(_call(turn), None) for turn in new], [turn.id in completed for turn in done], busy)


def _call(turn: NewTurn) -> tuple[int, str, bytes, int]:
    return turn.session_id, turn.lane, turn.digest, turn.ordinal


def _columns(names: Sequence[str], rows: Sequence[NewTurn] | Sequence[CompletedTurn]) -> list[list[object]]:
    """The rows' values by column, in the driver's types."""
    columns = []
    for name in names:
        column = [getattr(row, name) for row in rows]
        columns.append([orjson.dumps(one).decode() for one in column] if name == "version_spans" else column)
    return columns


_NEW = NewTurn.__slots__
_DONE = CompletedTurn.__slots__
_SQL_TYPES = {
    column.name: column.type.compile(postgresql.dialect())  # type: ignore[no-untyped-call]
    for column in TurnTable.__table__.columns
}


def _given(names: Sequence[str], first: int) -> str:
    """Rows of these columns of `turn` from array parameters, the first of which is number `first`."""
    arrays = ", ".join(f"${at}::{_SQL_TYPES[name]}[]" for at, name in enumerate(names, first))
    return f"unnest({arrays}) AS given ({', '.join(names)})"


@cache
def _written(opens: bool, completes: bool, delivers: bool, wait: bool) -> str:
    """The statement of `write_turns` with these parts.

    Rows are inserted and completed only for sessions that `locked` has returned: `FOR SHARE` waits for a seal or skips
    the session, and returns the newest state, also if it was changed after the statement began.
    """
    parts = []
    results = []
    position = 1
    if opens or completes:
        skip = "" if wait else " SKIP LOCKED"
        parts.append(f"locked AS (SELECT id, state FROM session WHERE id = ANY($1::bigint[]) FOR SHARE{skip})")
        results.append(
            "SELECT 'locked' AS part, id, NULL::bigint AS session_id, NULL::text AS lane,"
            " NULL::bytea AS digest, NULL::int AS ordinal FROM locked"
        )
        position += 1
    is_open = f"given.session_id IN (SELECT id FROM locked WHERE state = '{SessionState.OPEN}')"
    if opens:
        parts.append(
            f"opened AS (INSERT INTO turn ({', '.join(_NEW)}, worker) SELECT {', '.join(_NEW)}, lease_owner"
            f" FROM {_given(_NEW, position)} WHERE {is_open}"
            " ON CONFLICT DO NOTHING RETURNING id, session_id, lane, digest, ordinal)"
        )
        results.append("SELECT 'opened', id, session_id, lane, digest, ordinal FROM opened")
        position += len(_NEW)
    if completes:
        sets = ", ".join(f"{name} = given.{name}" for name in _DONE if name not in ("id", "session_id"))
        parts.append(
            f"completed AS (UPDATE turn SET {sets}, state = 'completed', completed_at = now()"
            f" FROM {_given(_DONE, position)} WHERE turn.id = given.id AND turn.session_id = given.session_id"
            f" AND turn.state = 'in_flight' AND {is_open} RETURNING turn.id)"
        )
        results.append("SELECT 'completed', id, NULL, NULL, NULL, NULL FROM completed")
        position += len(_DONE)
    if delivers:
        parts.append(
            "delivered AS (UPDATE turn SET delivered = true, lease_owner = NULL"
            f" WHERE id = ANY(${position}::bigint[]) AND state = 'completed')"
        )
        results = results or ["SELECT 'delivered' AS part"]
    return f"WITH {', '.join(parts)} {' UNION ALL '.join(results)}"


_IDS = bindparam("ids", type_=ARRAY(BigInteger))
_LOCK_ALONE = text("SELECT id FROM session WHERE id = ANY(:ids) ORDER BY id FOR NO KEY UPDATE").bindparams(_IDS)
_LOCK_ALONE_FREE = text(_LOCK_ALONE.text + " SKIP LOCKED").bindparams(_IDS)
_LEASED = process_lives(TurnTable.worker)
_ATTACHED = TurnTable.lease_owner.is_not(None) & process_lives(TurnTable.lease_owner)


async def abort_turn(conn: AsyncConnection, turn_id: int) -> None:
    """Mark a call in flight that has failed as aborted."""
    statement = update(TurnTable).where(TurnTable.id == turn_id, TurnTable.state == TurnState.IN_FLIGHT)
    await conn.execute(statement.values(state=TurnState.ABORTED, lease_owner=None))


async def abort_lost_opens(
    conn: AsyncConnection, lost: Sequence[NewTurn], running_ids: Collection[int], wait: bool = False
) -> frozenset[int]:
    """Abort the rows of calls whose insertion was not confirmed, if they were stored and no task generates them.

    `running_ids`: the turns that this process generates; it is read after the sessions are locked, because a
    transaction whose confirmation was lost may still be committing, with its lock on the session. Returns the sessions
    that another transaction has locked: nothing was done for these. With `wait` their lock is waited for.
    """
    asked = {turn.session_id for turn in lost}
    locked = set((await conn.execute(_LOCK_ALONE if wait else _LOCK_ALONE_FREE, {"ids": list(asked)})).scalars())
    for turn in lost:
        if turn.session_id in locked:
            where = (
                (TurnTable.session_id == turn.session_id)
                & (TurnTable.lane == turn.lane)
                & (TurnTable.digest == turn.digest)
                & (TurnTable.ordinal == turn.ordinal)
                & (TurnTable.worker == turn.lease_owner)
                & (TurnTable.state == TurnState.IN_FLIGHT)
                & TurnTable.id.not_in(list(running_ids))
            )
            await conn.execute(update(TurnTable).where(where).values(state=TurnState.ABORTED, lease_owner=None))
    return frozenset() if wait else frozenset(asked - locked)


async def set_engine(conn: AsyncConnection, turn_id: int, engine_id: int) -> None:
    """Record which engine the call runs on, so that the `diff` stage, which seals the session, can abort it there."""
    statement = update(TurnTable).where(TurnTable.id == turn_id, TurnTable.state == TurnState.IN_FLIGHT)
    await conn.execute(statement.values(engine_id=engine_id))


async def mark_detached(conn: AsyncConnection, turn_id: int, owner: str) -> None:
    """Record that the call's client has disconnected; generation continues under the lease and a retry may join it."""
    await conn.execute(
        update(TurnTable).where(TurnTable.id == turn_id, TurnTable.lease_owner == owner).values(lease_owner=None)
    )


async def take_over_turn(conn: AsyncConnection, turn_id: int, process_id: str) -> bool:
    """Become the worker of a call in flight whose worker has died, or is this process; return False if it is neither.

    It is this process's own if a commit succeeded whose confirmation was lost.
    """
    statement = update(TurnTable).where(
        TurnTable.id == turn_id, TurnTable.state == TurnState.IN_FLIGHT, ~_LEASED | (TurnTable.worker == process_id)
    )
    return bool((await conn.execute(statement.values(worker=process_id, lease_owner=process_id))).rowcount)


class StoredPrompt(NamedTuple):
    """A turn's prompt: the first `kept_tokens` of the parent's stream, followed by `suffix_ids`."""

    parent_turn_id: int | None
    kept_tokens: int
    suffix_ids: bytes


async def load_prompt(conn: AsyncConnection, turn_id: int) -> StoredPrompt | None:
    """Return the prompt that was stored when the turn was opened; None if the turn is missing."""
    statement = select(*columns_of(StoredPrompt, TurnTable)).where(TurnTable.id == turn_id)
    return await read_one(conn, StoredPrompt, statement)


async def attach_client(conn: AsyncConnection, turn_id: int, process_id: str) -> None:
    """Record that a client of this process waits for the call's answer."""
    statement = update(TurnTable).where(TurnTable.id == turn_id, TurnTable.state != TurnState.ABORTED)
    await conn.execute(statement.values(lease_owner=process_id))


_KNOWN = select(*columns_of(KnownCall, TurnTable, leased=_LEASED, attached=_ATTACHED))


async def find_calls(conn: AsyncConnection, session_id: int, lane: str, digest: bytes, limit: int) -> list[KnownCall]:
    """Return the newest turns with this digest in this lane, newest first."""
    where = (TurnTable.session_id == session_id) & (TurnTable.lane == lane) & (TurnTable.digest == digest)
    rows = await conn.execute(_KNOWN.where(where).order_by(TurnTable.ordinal.desc()).limit(limit))
    return [_known(row) for row in rows]


async def get_call(conn: AsyncConnection, turn_id: int) -> KnownCall | None:
    row = (await conn.execute(_KNOWN.where(TurnTable.id == turn_id))).one_or_none()
    return None if row is None else _known(row)


def _known(row: Any) -> KnownCall:
    return replace(KnownCall(*row), state=TurnState(row.state))


async def _came_back(conn: AsyncConnection, of_attempt: ColumnElement[bool], ended: Collection[int]) -> set[int]:
    """Turns whose answer is in the history of a later request, or, for sub-agents' turns in `ended`, whose text another
    lane's request quotes: what a sub-agent says last is a tool's result for the one that asked it."""
    columns = (TurnTable.id, TurnTable.lane, TurnTable.request, TurnTable.answer)
    rows = [
        (row.id, row.lane, unpack_json(row.request), row.answer)
        for row in await conn.execute(select(*columns).where(of_attempt))
    ]
    found = {
        after
        for _, _, request, _ in rows
        if isinstance(request, dict) and isinstance(after := request.get("after"), int)
    }
    for turn_id, lane, _, packed in rows:
        answer = unpack_json(packed) if packed and turn_id in ended else None
        text = str(answer["message"]["content"] or "").strip() if isinstance(answer, dict) else ""
        later = (request for at, other, request, _ in rows if at > turn_id and other != lane)
        if len(text) >= _QUOTED_CHARS and any(_quotes(request, text) for request in later):
            found.add(turn_id)
    return found


def _quotes(request: Any, text: str) -> bool:
    messages = request.get("messages", ()) if isinstance(request, dict) else ()
    return any(text in str(message.get("content")) for message in messages)


async def load_metas(conn: AsyncConnection, rollout_id: int, attempt: int) -> list[TurnMeta]:
    """Return all completed turns of one attempt without their arrays, parents before children."""
    num_suffix = cast(func.octet_length(TurnTable.suffix_ids) // 4, TurnTable.kept_tokens.type).label("num_suffix")
    stored = [name for name in TurnMeta.__slots__ if name not in ("num_suffix", "came_back")]
    of_attempt = (TurnTable.rollout_id == rollout_id) & (TurnTable.attempt == attempt)
    where = of_attempt & (TurnTable.state == TurnState.COMPLETED)
    names = [getattr(TurnTable, name) for name in stored]
    rows = (await conn.execute(select(*names, num_suffix).where(where).order_by(TurnTable.id))).all()
    came_back: set[int] = set()
    if not all(row.delivered for row in rows):  # only a kill, or a client that left, leaves such a turn
        came_back = await _came_back(conn, of_attempt, {row.id for row in rows if row.lane and not row.delivered})
    return [
        TurnMeta(
            **{
                **row._mapping,
                "kind": TurnKind(row.kind),
                "fork_cause": None if row.fork_cause is None else ForkCause(row.fork_cause),
                "came_back": not row.delivered and row.id in came_back,
            }
        )
        for row in rows
    ]
