"""Rows of `engine`: which vLLM servers exist, what they serve, whether they may be sent calls.

Why here: the table is the only meeting point of wrapper, adapter and weight sync; every change names the state it expects.
Called by: `engine.server` (its own row), `adapter/turns/routing.py` (ready ones), `engine/weight_update.py` (pause lease, version, quarantine).

A pause is a lease: whoever pauses writes `paused_until` first, and the wrapper ends a pause whose lease has run out.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import func, literal, select, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.store.runs import ADHOC
from ratchet.store.schema import EngineTable, PolicyVersionTable, RunTable
from ratchet.types import EngineState, PolicyVersionState, RunState

SILENT_SECONDS = 20.0
"""An engine whose wrapper has not been heard of for so long gets no calls and no weights until it has caught up."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """`silent_seconds` since the last heartbeat; `pause_seconds_left` None where no pause is leased, negative once it has run out."""

    id: int
    address: str
    state: EngineState
    version: str | None
    model_path: str
    silent_seconds: float
    pause_seconds_left: float | None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def reachable(self) -> bool:
        """In service, or paused for new weights, and heard of lately."""
        return self.state in (EngineState.READY, EngineState.SYNCING) and self.silent_seconds < SILENT_SECONDS


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """A published policy version as the wrapper needs it."""

    version: str
    uri: str
    files: list[dict[str, Any]]
    canary: dict[str, Any] | None


_ROW = select(
    EngineTable.id,
    EngineTable.address,
    EngineTable.state,
    EngineTable.version,
    EngineTable.model_path,
    func.extract("epoch", func.now() - EngineTable.heartbeat_at).label("silent_seconds"),
    func.extract("epoch", EngineTable.paused_until - func.now()).label("pause_seconds_left"),
    EngineTable.details,
)


def _row(row: Any) -> EngineRow:
    left = row.pause_seconds_left
    return EngineRow(
        id=row.id,
        address=row.address,
        state=EngineState(row.state),
        version=row.version,
        model_path=row.model_path,
        silent_seconds=float(row.silent_seconds),
        pause_seconds_left=None if left is None else float(left),
        details=row.details,
    )


async def register_engine(conn: AsyncConnection, address: str, model_path: str, details: dict[str, Any]) -> int:
    """The engine's row in state `starting`, without version or lease: whatever an earlier process at this address said is void."""
    values = {
        "state": EngineState.STARTING,
        "version": None,
        "model_path": model_path,
        "details": details,
        "paused_until": None,
    }
    statement = insert(EngineTable).values(address=address, **values)
    statement = statement.on_conflict_do_update(index_elements=["address"], set_=values | {"heartbeat_at": func.now()})
    return int((await conn.execute(statement.returning(EngineTable.id))).scalar_one())


async def heartbeat_engine(conn: AsyncConnection, engine_id: int) -> EngineRow | None:
    """Says that the engine lives, and returns its row as others have left it; None where the row is gone."""
    await conn.execute(update(EngineTable).where(EngineTable.id == engine_id).values(heartbeat_at=func.now()))
    return await get_engine(conn, engine_id)


async def get_engine(conn: AsyncConnection, engine_id: int) -> EngineRow | None:
    row = (await conn.execute(_ROW.where(EngineTable.id == engine_id))).one_or_none()
    return None if row is None else _row(row)


async def list_engines(conn: AsyncConnection) -> list[EngineRow]:
    """All engines that are not `gone`, oldest first."""
    rows = await conn.execute(_ROW.where(EngineTable.state != EngineState.GONE).order_by(EngineTable.id))
    return [_row(row) for row in rows]


async def ready_engines(conn: AsyncConnection, max_silent_seconds: float = SILENT_SECONDS) -> list[EngineRow]:
    """Engines in state `ready` whose wrapper has been heard of lately, oldest first."""
    fresh = EngineTable.heartbeat_at > func.now() - timedelta(seconds=max_silent_seconds)
    rows = await conn.execute(_ROW.where(EngineTable.state == EngineState.READY, fresh).order_by(EngineTable.id))
    return [_row(row) for row in rows]


async def set_engine_state(conn: AsyncConnection, engine_id: int, expected: EngineState, state: EngineState) -> bool:
    """Whether the engine was in `expected` and is now in `state`. Leaving `syncing` ends the pause lease."""
    values: dict[str, Any] = {"state": state}
    if expected is EngineState.SYNCING:
        values["paused_until"] = None
    statement = update(EngineTable).where(EngineTable.id == engine_id, EngineTable.state == expected).values(**values)
    return bool((await conn.execute(statement)).rowcount)


async def set_engine_gone(conn: AsyncConnection, engine_id: int) -> None:
    """The server has ended, whatever its state was."""
    await conn.execute(
        update(EngineTable)
        .where(EngineTable.id == engine_id)
        .values(state=EngineState.GONE, version=None, paused_until=None)
    )


async def set_engine_version(conn: AsyncConnection, engine_id: int, version: str | None) -> None:
    """Records which weights the engine serves now."""
    await conn.execute(update(EngineTable).where(EngineTable.id == engine_id).values(version=version))


async def set_engine_details(conn: AsyncConnection, engine_id: int, details: dict[str, Any]) -> None:
    """Adds to what the engine's row says about it."""
    await conn.execute(
        update(EngineTable)
        .where(EngineTable.id == engine_id)
        .values(details=EngineTable.details.op("||")(literal(details, JSONB)))
    )


async def canary_of(conn: AsyncConnection, version: str | None) -> dict[str, Any] | None:
    """What the learner said about the fixed text under these weights; None where it did not (initial weights)."""
    statement = select(PolicyVersionTable.canary).where(PolicyVersionTable.version == version)
    return (await conn.execute(statement)).scalar_one_or_none()


async def begin_engine_pause(conn: AsyncConnection, engine_id: int, seconds: float) -> bool:
    """`ready` → `syncing` with a lease of `seconds`: False where the engine is not ready. Call before pausing vLLM."""
    until = func.now() + timedelta(seconds=seconds)
    statement = update(EngineTable).where(EngineTable.id == engine_id, EngineTable.state == EngineState.READY)
    return bool((await conn.execute(statement.values(state=EngineState.SYNCING, paused_until=until))).rowcount)


async def extend_engine_pause(conn: AsyncConnection, engine_id: int, seconds: float) -> bool:
    """Lengthens a lease that has not run out; False means that the pause is no longer ours."""
    until = func.now() + timedelta(seconds=seconds)
    alive = (EngineTable.state == EngineState.SYNCING) & (EngineTable.paused_until > func.now())
    return bool(
        (
            await conn.execute(update(EngineTable).where(EngineTable.id == engine_id, alive).values(paused_until=until))
        ).rowcount
    )


async def end_engine_pause(
    conn: AsyncConnection, engine_id: int, version: str | None, state: EngineState = EngineState.READY
) -> bool:
    """`syncing` → `state` with the version now served, if the lease still holds; False where the wrapper has already taken over."""
    alive = (EngineTable.state == EngineState.SYNCING) & (EngineTable.paused_until > func.now())
    statement = update(EngineTable).where(EngineTable.id == engine_id, alive)
    return bool((await conn.execute(statement.values(state=state, version=version, paused_until=None))).rowcount)


async def take_over_engine_pause(conn: AsyncConnection, engine_id: int, seconds: float) -> bool:
    """The wrapper's half of the lease: holds a pause that has run out, so that nobody else can end it meanwhile."""
    lapsed = (EngineTable.state == EngineState.SYNCING) & (
        (EngineTable.paused_until < func.now()) | EngineTable.paused_until.is_(None)
    )
    until = func.now() + timedelta(seconds=seconds)
    return bool(
        (
            await conn.execute(
                update(EngineTable).where(EngineTable.id == engine_id, lapsed).values(paused_until=until)
            )
        ).rowcount
    )


async def newest_published_policies(conn: AsyncConnection) -> list[PublishedPolicy]:
    """Published versions of the running (or paused) run that published last, newest first; empty where no run is open."""
    trains = (
        RunTable.state.in_((RunState.RUNNING, RunState.PAUSED))
        & (RunTable.config_name != ADHOC)
        & RunTable.source_run_id.is_(None)
    )
    open_run = trains & (PolicyVersionTable.state == PolicyVersionState.PUBLISHED)
    joined = select(PolicyVersionTable).join(RunTable, RunTable.run_id == PolicyVersionTable.run_id).where(open_run)
    latest = (
        joined.with_only_columns(PolicyVersionTable.run_id)
        .order_by(PolicyVersionTable.created_at.desc())
        .limit(1)
        .scalar_subquery()
    )
    rows = await conn.execute(
        select(PolicyVersionTable.version, PolicyVersionTable.uri, PolicyVersionTable.files, PolicyVersionTable.canary)
        .where(PolicyVersionTable.run_id == latest, PolicyVersionTable.state == PolicyVersionState.PUBLISHED)
        .order_by(PolicyVersionTable.step.desc(), PolicyVersionTable.epoch.desc())
    )
    return [PublishedPolicy(row.version, row.uri, row.files, row.canary) for row in rows]
