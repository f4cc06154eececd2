"""Rows of `session` and `session_token`: the adapter serves one attempt of one rollout per session.

Sessions are opened, sealed and inspected through the store; the adapter has no admin API.
"""

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, NotRequired, TypedDict
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    DateTime,
    Select,
    bindparam,
    cast,
    exists,
    func,
    literal,
    literal_column,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.types import BigInteger, LargeBinary

from ratchet.config_engines import DEFAULT_SET
from ratchet.config_sections import EndpointConfig, EngineConfig
from ratchet.errors import FencedError
from ratchet.lora_slots import FIRST_SLOT, version_in_label
from ratchet.types import SessionState, TurnState
from store.adapters import ADAPTER_HEARTBEAT, adapters_alive_seconds, adapters_away_seconds
from store.columns import columns_of
from store.runs import ADHOC
from store.schema import (
    AdapterProcessTable,
    EngineTable,
    InstallationTable,
    RolloutTable,
    RunTable,
    SessionTable,
    SessionTokenTable,
    TurnTable,
)


class SessionLimits(TypedDict):
    """Token limits of each model call, and the largest number of calls (unlimited if missing)."""

    max_context_tokens: int
    max_response_tokens: int
    min_response_tokens: int
    max_turns: NotRequired[int | None]


class EngineCall(NamedTuple):
    """A call in flight: the address of its engine and its request id there."""

    engine_address: str
    request_id: str


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session; `SessionTable` describes the columns. `run_id`, `engine_set`, `lora_slot`, `model_path`, `engine`: of
    its rollout's run; the last is read for an endpoint only. `is_by_hand`: that run holds rollouts that are started by
    hand. `installation`: of this store, None before a worker or an adapter has run. `has_earlier`: its rollout has an
    earlier session, whose turns may be replayed."""

    id: int
    rollout_id: int
    attempt: int
    state: SessionState
    temperature: float
    model: str
    limits: SessionLimits
    endpoint: EndpointConfig | None = None
    run_id: str = ""
    installation: UUID | None = None
    engine_set: str = DEFAULT_SET
    lora_slot: int = FIRST_SLOT
    is_by_hand: bool = False
    model_path: str = ""
    engine: EngineConfig | None = None
    has_earlier: bool = False

    def version_in(self, label: str | None) -> str | None:
        """Return the version in an engine's label with which it answers this session; None if the session's slot has
        none, or that of another run, because its run was stopped and has another slot now."""
        version = version_in_label(label, self.lora_slot)
        if version is None or "/" not in version or self.is_by_hand:
            return version
        return version if version.startswith(f"{self.run_id}/") else None


WAITS_RECORDED_SECONDS = 1.0
"""The interval at which adapters write the waits of their calls (`add_engine_waits`)."""

AttemptKey = tuple[int, int]
"""A rollout's id, and which of its attempts."""


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """The progress of an agent.

    `has_called`: a model call was begun; only then can the policy have influenced the agent. `refusal`: why a call was
    first refused for its content, None if none was. `last_call_age_seconds`: time since its last call started or ended,
    None without a call. `engine_wait_seconds`: time in which its calls waited for an engine or the store, or in which
    it was suspended at its deadline. `away_seconds`: time since its first token without any adapter. `both_seconds`:
    time that `engine_wait_seconds` and `away_seconds` have in common. `silent_seconds`: time for which the process of
    its newest call, which is in flight, has not renewed its lease although other adapters work: the process has lost
    the store or was killed; without the part that `engine_wait_seconds` has of it. `idle_seconds`: time since its last
    call ended, or since its first token; 0 while a call is in flight, in which case `has_open_call` is True.
    """

    num_turns: int
    has_called: bool
    refusal: str | None
    last_call_age_seconds: float | None
    engine_wait_seconds: float
    away_seconds: float
    both_seconds: float
    silent_seconds: float
    idle_seconds: float
    has_open_call: bool

    @property
    def waited_seconds(self) -> float:
        """Time that does not count against the agent's budget."""
        return self.recorded_wait_seconds + self.silent_seconds

    @property
    def recorded_wait_seconds(self) -> float:
        """The part of `waited_seconds` that never becomes less."""
        return max(0.0, self.engine_wait_seconds + self.away_seconds - self.both_seconds)


def token_hash(token: str) -> bytes:
    """Return the sha256 of a token, which is what the store holds of it."""
    return hashlib.sha256(token.encode()).digest()


def request_id(turn_id: int) -> str:
    """Return the request id of a turn at its engine, by which any process can abort the call."""
    return f"turn-{turn_id}"


@dataclass(frozen=True, slots=True)
class EngineWait:
    """A time, by one process's clock, in which calls of a session waited or its agent was suspended."""

    began_at: datetime
    ended_at: datetime


_LENGTH = "SELECT coalesce(sum(extract(epoch FROM upper(span) - lower(span))), 0) FROM unnest({}) AS span"

_ADD_WAITS = text(f"""
WITH added AS (
  SELECT given.id, range_agg(tstzrange(began, ended)) AS spans
  FROM unnest(:ids, :began, :ended) AS given(id, began, ended) GROUP BY given.id
)
UPDATE session SET engine_waits = engine_waits + spans,
  engine_wait_seconds = engine_wait_seconds + ({_LENGTH.format("spans - engine_waits")})
FROM added WHERE session.id = added.id
""").bindparams(
    bindparam("ids", type_=ARRAY(BigInteger)),
    bindparam("began", type_=ARRAY(DateTime(timezone=True))),
    bindparam("ended", type_=ARRAY(DateTime(timezone=True))),
)

_AWAY_WHILE_WAITING: ColumnElement[float] = literal_column(f"""(
  SELECT ({_LENGTH.format("away.gaps * session.engine_waits")})
  FROM (
    SELECT range_agg(tstzrange(began_at, greatest(began_at, ended_at))) AS gaps
    FROM outage WHERE part = '{ADAPTER_HEARTBEAT}' AND ended_at > session.created_at
  ) AS away
)""")


_WAITED_SINCE_LEASE: ColumnElement[float] = literal_column(
    f"({_LENGTH.format('session.engine_waits * tstzmultirange(tstzrange(seen.leased_until, NULL))')})"
)


async def open_session(
    conn: AsyncConnection,
    rollout_id: int,
    attempt: int,
    temperature: float,
    model: str,
    limits: SessionLimits,
    endpoint: EndpointConfig | None = None,
) -> int:
    """Return the id of this attempt's session, inserting it if missing; an existing one keeps its values and state."""
    values: dict[str, Any] = {
        "rollout_id": rollout_id,
        "attempt": attempt,
        "temperature": temperature,
        "model": model,
        "limits": limits,
    }
    if endpoint is not None:
        values["endpoint"] = endpoint.model_dump(mode="json")
    statement = insert(SessionTable).values(**values)
    same = statement.on_conflict_do_update(
        index_elements=["rollout_id", "attempt"], set_={"attempt": statement.excluded.attempt}
    )
    return int((await conn.execute(same.returning(SessionTable.id))).scalar_one())


async def add_token(conn: AsyncConnection, session_id: int) -> str:
    """Return a new token of 256 random bits; it and all earlier ones are valid until the session closes;
    adapters cache them for up to a minute, but no turn is opened in a closed session.

    Raises FencedError if the session is closed.
    """
    token = secrets.token_urlsafe(32)
    is_open = (
        select(SessionTable.id)
        .where(SessionTable.id == session_id, SessionTable.state == SessionState.OPEN)
        .with_for_update(key_share=True)  # the row may be updated below: two that shared it would wait for each other
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
    """Return the session of the token with this sha256, open or closed; None if the token is unknown."""
    installation = select(InstallationTable.uuid).scalar_subquery()
    earlier = aliased(SessionTable)
    columns = columns_of(
        SessionRow,
        SessionTable,
        run_id=RolloutTable.run_id,
        installation=installation,
        engine_set=RunTable.engine_set,
        lora_slot=RunTable.lora_slot,
        is_by_hand=RunTable.config_name == ADHOC,
        model_path=RunTable.model_path,
        engine=RunTable.config["engine"],
        has_earlier=exists().where(
            earlier.rollout_id == SessionTable.rollout_id, earlier.attempt < SessionTable.attempt
        ),
    )
    statement = (
        select(*columns)
        .join(SessionTokenTable, SessionTokenTable.session_id == SessionTable.id)
        .join(RolloutTable, RolloutTable.id == SessionTable.rollout_id)
        .join(RunTable, RunTable.run_id == RolloutTable.run_id)
        .where(SessionTokenTable.token_hash == digest)
    )
    row = (await conn.execute(statement)).one_or_none()
    if row is None:
        return None
    endpoint = None if row.endpoint is None else EndpointConfig.model_validate(row.endpoint, extra="ignore")
    engine = None if endpoint is None else EngineConfig.model_validate(row.engine or {}, extra="ignore")
    return replace(SessionRow(*row), state=SessionState(row.state), endpoint=endpoint, engine=engine)


async def close_session(conn: AsyncConnection, rollout_id: int, attempt: int) -> list[EngineCall]:
    """Seal the session: after the commit no turn of this attempt can be opened or completed.

    Waits for turns that are being opened or completed, marks turns in flight as `aborted`, and returns the calls to
    abort at their engines. Safe to repeat."""
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
        .values(state=TurnState.ABORTED, lease_owner=None)
        .returning(TurnTable.id, TurnTable.engine_id)
    )
    calls = {row.id: row.engine_id for row in aborted if row.engine_id is not None}
    if not calls:
        return []
    addresses = await conn.execute(
        select(EngineTable.id, EngineTable.address).where(EngineTable.id.in_(set(calls.values())))
    )
    known = {row.id: row.address for row in addresses}
    return [
        EngineCall(known[engine_id], request_id(turn_id)) for turn_id, engine_id in calls.items() if engine_id in known
    ]


@cache  # building it takes longer than running it
def _progress_statement() -> Select[Any]:
    """The statement of `read_progress`; `attempts`: pairs of rollout and attempt."""
    turns = (
        select(
            func.count(TurnTable.id).filter(TurnTable.state == TurnState.COMPLETED).label("num_turns"),
            func.extract(
                "epoch",
                func.now()
                - func.max(func.coalesce(TurnTable.replayed_at, TurnTable.completed_at, TurnTable.created_at)),
            ).label("age"),
            func.count(TurnTable.id).filter(TurnTable.state == TurnState.IN_FLIGHT).label("num_in_flight"),
            func.count(TurnTable.id).label("num_begun"),
            func.max(AdapterProcessTable.alive_until)
            .filter(TurnTable.state == TurnState.IN_FLIGHT)
            .label("leased_until"),
        )
        .select_from(TurnTable)
        .outerjoin(AdapterProcessTable, AdapterProcessTable.id == TurnTable.worker)
        .where(TurnTable.session_id == SessionTable.id)
        .lateral("seen")
    )
    first_token = (
        select(func.min(SessionTokenTable.created_at))
        .where(SessionTokenTable.session_id == SessionTable.id)
        .scalar_subquery()
    )
    opened = func.extract("epoch", func.now() - func.coalesce(first_token, SessionTable.created_at)).label("opened")
    away = func.greatest(
        0.0, adapters_away_seconds() - func.coalesce(SessionTable.away_before, adapters_away_seconds())
    ).label("away")
    key = (SessionTable.rollout_id, SessionTable.attempt)
    of_session = (SessionTable.engine_wait_seconds, SessionTable.refusal, _AWAY_WHILE_WAITING.label("both"))
    silent = (adapters_alive_seconds(since=turns.c.leased_until) - _WAITED_SINCE_LEASE).label("silent")
    columns = (*key, *of_session, away, *turns.c, opened, silent)
    return select(*columns).where(tuple_(*key).in_(bindparam("attempts", expanding=True)))


async def read_progress(conn: AsyncConnection, attempts: Collection[AttemptKey]) -> dict[AttemptKey, SessionProgress]:
    """Return how far agents are, by rollout and attempt, with one query; attempts without a session are left out."""
    rows = await conn.execute(_progress_statement(), {"attempts": list(attempts)})
    return {(row.rollout_id, row.attempt): _progress(row) for row in rows}


def _progress(row: Any) -> SessionProgress:
    age = None if row.age is None else float(row.age)
    idle = 0.0 if row.num_in_flight else float(row.opened) if age is None else age
    silent = 0.0 if row.silent is None else max(0.0, float(row.silent))
    return SessionProgress(
        num_turns=row.num_turns,
        has_called=bool(row.num_begun),
        refusal=row.refusal,
        last_call_age_seconds=age,
        engine_wait_seconds=row.engine_wait_seconds,
        away_seconds=float(row.away),
        both_seconds=float(row.both),
        silent_seconds=silent if age is not None and age >= silent else 0.0,
        idle_seconds=idle,
        has_open_call=bool(row.num_in_flight),
    )


async def wait_for_writers(conn: AsyncConnection, session_id: int) -> None:
    """Wait until no other transaction has locked the session's row, so that adapters can write its waits."""
    await conn.execute(select(SessionTable.id).where(SessionTable.id == session_id).with_for_update(read=True))


async def add_engine_waits(conn: AsyncConnection, waits: Mapping[int, Sequence[EngineWait]]) -> set[int]:
    """Add waits to sessions by id and return the ids that were updated; locked sessions are skipped.

    Safe to repeat: a time that a session has waited already, also by a sub-agent's call, is not added again.
    """
    free = select(SessionTable.id).where(SessionTable.id.in_(waits)).with_for_update(key_share=True, skip_locked=True)
    found = set((await conn.execute(free)).scalars()) if waits else set()
    spans = [(key, one) for key in found for one in waits[key]]
    if spans:
        arguments = {
            "ids": [key for key, _ in spans],
            "began": [one.began_at for _, one in spans],
            "ended": [max(one.began_at, one.ended_at) for _, one in spans],  # the clock may have been set back
        }
        await conn.execute(_ADD_WAITS, arguments)
    return found


async def session_id_of(conn: AsyncConnection, rollout_id: int, attempt: int) -> int:
    """Return the id of the attempt's session. Raises FencedError if there is none; `boot` opens it."""
    statement = select(SessionTable.id).where(SessionTable.rollout_id == rollout_id, SessionTable.attempt == attempt)
    session_id = (await conn.execute(statement)).scalar_one_or_none()
    if session_id is None:
        raise FencedError(f"attempt {attempt} of rollout {rollout_id} has no session")
    return int(session_id)
