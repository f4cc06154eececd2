"""Rows of `session` and `session_token`: the adapter's licence to serve one attempt of one rollout.

Why here: opening, sealing and asking how far an agent is are store operations; there is no admin API.
Called by: the activities `workspace`, `agent` and `diff`, the adapter (look-up by token hash), the sweep.

`limits`: {"max_context_tokens", "max_response_tokens", "min_response_tokens", "max_turns" (null: none)}.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ARRAY, Float, cast, column, func, literal, select, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import BigInteger, LargeBinary

from ratchet.errors import FencedError
from ratchet.store.adapters import adapters_away_seconds
from ratchet.store.schema import EngineTable, RolloutTable, SessionTable, SessionTokenTable, TurnTable
from ratchet.types import SessionState, TurnState


@dataclass(frozen=True, slots=True)
class SessionRow:
    id: int
    rollout_id: int
    attempt: int
    state: SessionState
    temperature: float
    model: str
    limits: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """`last_call_age_seconds` None: no call yet. `engine_wait_seconds`: time in which the agent could only wait for an engine.

    `adapters_away_seconds`: time since its first token in which no adapter was there.
    `idle_seconds`: since its last call ended, or since its first token; 0 while a call is in flight.
    """

    num_turns: int
    last_call_age_seconds: float | None
    engine_wait_seconds: float
    away_seconds: float
    idle_seconds: float

    @property
    def waited_seconds(self) -> float:
        """Time that was not the agent's own."""
        return self.engine_wait_seconds + self.away_seconds


def token_hash(token: str) -> bytes:
    """What the store knows of a token."""
    return hashlib.sha256(token.encode()).digest()


def request_id(turn_id: int) -> str:
    """The name of a turn's call at the engine, so that any process can abort it."""
    return f"turn-{turn_id}"


async def open_session(
    conn: AsyncConnection, rollout_id: int, attempt: int, temperature: float, model: str, limits: dict[str, Any]
) -> int:
    """The session of this attempt, made if missing. A second try gets the same one with its first values, open or closed."""
    values = {
        "rollout_id": rollout_id,
        "attempt": attempt,
        "temperature": temperature,
        "model": model,
        "limits": limits,
    }
    statement = insert(SessionTable).values(**values)
    same = statement.on_conflict_do_update(
        index_elements=["rollout_id", "attempt"], set_={"attempt": statement.excluded.attempt}
    )
    return int((await conn.execute(same.returning(SessionTable.id))).scalar_one())


async def add_token(conn: AsyncConnection, session_id: int) -> str:
    """A new token of 256 random bits, valid until the session closes, as are all before it.

    Raises FencedError where the session is closed.
    """
    token = secrets.token_urlsafe(32)
    is_open = (
        select(SessionTable.id)
        .where(SessionTable.id == session_id, SessionTable.state == SessionState.OPEN)
        .with_for_update(read=True)
    )
    alive = is_open.cte("alive")
    columns = select(cast(literal(token_hash(token), LargeBinary), LargeBinary), cast(alive.c.id, BigInteger))
    added = await conn.execute(insert(SessionTokenTable).from_select(["token_hash", "session_id"], columns))
    if not added.rowcount:
        raise FencedError(f"session {session_id} is closed: no token can be added")
    first = update(SessionTable).where(SessionTable.id == session_id, SessionTable.away_before.is_(None))
    await conn.execute(first.values(away_before=adapters_away_seconds()))
    return token


async def find_session(conn: AsyncConnection, digest: bytes) -> SessionRow | None:
    """The session that a token's sha256 belongs to, open or closed."""
    row = (
        await conn.execute(
            select(
                SessionTable.id,
                SessionTable.rollout_id,
                SessionTable.attempt,
                SessionTable.state,
                SessionTable.temperature,
                SessionTable.model,
                SessionTable.limits,
            )
            .join(SessionTokenTable, SessionTokenTable.session_id == SessionTable.id)
            .where(SessionTokenTable.token_hash == digest)
        )
    ).one_or_none()
    if row is None:
        return None
    return SessionRow(
        row.id, row.rollout_id, row.attempt, SessionState(row.state), row.temperature, row.model, row.limits
    )


async def close_session(conn: AsyncConnection, rollout_id: int, attempt: int) -> list[tuple[str, str]]:
    """Seals: from the commit on no turn of this attempt can be opened or completed.

    Waits for turns that are just being opened or completed, marks what is in flight `aborted`, and returns (engine address,
    request id) of the calls to abort there. Running it again is harmless.
    """
    closed = await conn.execute(
        update(SessionTable)
        .where(SessionTable.rollout_id == rollout_id, SessionTable.attempt == attempt)
        .values(state=SessionState.CLOSED, closed_at=func.coalesce(SessionTable.closed_at, func.now()))
        .returning(SessionTable.id)
    )
    session_id = closed.scalar_one_or_none()
    if session_id is None:
        return []
    aborted = await conn.execute(
        update(TurnTable)
        .where(TurnTable.session_id == session_id, TurnTable.state == TurnState.IN_FLIGHT)
        .values(state=TurnState.ABORTED, lease_owner=None, lease_expires_at=None)
        .returning(TurnTable.id, TurnTable.engine_id)
    )
    calls = {row.id: row.engine_id for row in aborted if row.engine_id is not None}
    if not calls:
        return []
    addresses = await conn.execute(
        select(EngineTable.id, EngineTable.address).where(EngineTable.id.in_(set(calls.values())))
    )
    known = {row.id: row.address for row in addresses}
    return [(known[engine_id], request_id(turn_id)) for turn_id, engine_id in calls.items() if engine_id in known]


async def session_progress(conn: AsyncConnection, rollout_id: int, attempt: int) -> SessionProgress | None:
    """How far the agent is; None where it has no session yet. A call in flight counts as "last call" from its start."""
    turns = (
        select(
            func.count(TurnTable.id).filter(TurnTable.state == TurnState.COMPLETED).label("num_turns"),
            func.extract(
                "epoch", func.now() - func.max(func.coalesce(TurnTable.completed_at, TurnTable.created_at))
            ).label("age"),
            func.count(TurnTable.id).filter(TurnTable.state == TurnState.IN_FLIGHT).label("num_in_flight"),
        )
        .where(TurnTable.session_id == SessionTable.id)
        .lateral()
    )
    where = (SessionTable.rollout_id == rollout_id) & (SessionTable.attempt == attempt)
    first_token = (
        select(func.min(SessionTokenTable.created_at))
        .where(SessionTokenTable.session_id == SessionTable.id)
        .scalar_subquery()
    )
    opened = func.extract("epoch", func.now() - func.coalesce(first_token, SessionTable.created_at)).label("opened")
    away = func.greatest(
        0.0, adapters_away_seconds() - func.coalesce(SessionTable.away_before, adapters_away_seconds())
    ).label("away")
    columns = (SessionTable.engine_wait_seconds, away, turns.c.num_turns, turns.c.age, turns.c.num_in_flight, opened)
    row = (await conn.execute(select(*columns).where(where))).one_or_none()
    if row is None:
        return None
    age = None if row.age is None else float(row.age)
    idle = 0.0 if row.num_in_flight else float(row.opened) if age is None else age
    return SessionProgress(row.num_turns, age, row.engine_wait_seconds, float(row.away), idle)


async def add_engine_wait(conn: AsyncConnection, seconds: dict[int, float]) -> set[int]:
    """Adds waited seconds to sessions, by id, and says to which: one that somebody has locked is not waited for."""
    free = select(SessionTable.id).where(SessionTable.id.in_(seconds)).with_for_update(key_share=True, skip_locked=True)
    found = list((await conn.execute(free)).scalars()) if seconds else []
    if not found:
        return set()
    ids, values = cast(found, ARRAY(BigInteger)), cast([seconds[one] for one in found], ARRAY(Float(53)))
    added = (
        func.unnest(ids, values)
        .table_valued(column("id", BigInteger), column("seconds", Float), name="added")
        .render_derived()
    )
    statement = update(SessionTable).where(SessionTable.id == added.c.id)
    await conn.execute(statement.values(engine_wait_seconds=SessionTable.engine_wait_seconds + added.c.seconds))
    return set(found)


async def session_id_of(conn: AsyncConnection, rollout_id: int, attempt: int) -> int:
    """Raises FencedError where the attempt has no session, which `boot` makes."""
    statement = select(SessionTable.id).where(SessionTable.rollout_id == rollout_id, SessionTable.attempt == attempt)
    session_id = (await conn.execute(statement)).scalar_one_or_none()
    if session_id is None:
        raise FencedError(f"attempt {attempt} of rollout {rollout_id} has no session")
    return int(session_id)


async def note_template(conn: AsyncConnection, rollout_id: int, digest: str, kwargs: Mapping[str, Any]) -> None:
    """The rollout's provenance names the chat template that its prompts are made with, the newest if it changed."""
    noted = {"template_digest": digest, "chat_template_kwargs": dict(kwargs)}
    differs = RolloutTable.provenance["template_digest"].astext.is_distinct_from(digest)
    statement = update(RolloutTable).where(RolloutTable.id == rollout_id, differs)
    await conn.execute(statement.values(provenance=RolloutTable.provenance.concat(cast(noted, JSONB))))
