"""Rows of `engine`: which vLLM servers exist, which weights they serve, and whether they may receive calls.

Wrapper, adapter and weight update coordinate through this table only; every change carries the expected old state
(`ratchet.types.EngineState` lists the transitions). A pause is a lease: the process that pauses an engine writes
`paused_until` first, and the wrapper ends a pause whose lease has expired.

An engine belongs to one engine set. The id of a row says the set for ever: a wrapper that takes over the address of an
engine of another set makes a new row and ends the old one, so that what was meant for the old engine finds none.
"""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, case, func, literal, select, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import EngineUnavailableError
from ratchet.lora_slots import FIRST_SLOT, SEPARATOR, versions_of_label
from ratchet.types import OPEN_STATES, EngineState, JsonObject, PolicyVersionState
from store.columns import columns_of, seconds_of
from store.runs import ADHOC
from store.schema import EngineLoadTable, EngineTable, PolicyVersionTable, RunTable

SILENT_SECONDS = 20.0
"""Time without a heartbeat after which an engine gets no calls and no weights until it has loaded the newest ones."""
FENCE_SECONDS = 60.0
"""Longest lease of an engine that is gone: as long as that of a sync."""
FETCHED = "fetched"
"""Key of `details`: the versions from an address that are on the engine's node."""
CHECKS_FILES = "checks_files"
"""Key of `details`: whether our worker extension is in the engine's vLLM; missing if the user started it without."""
FETCH_ERROR = "fetch_error"
"""Key of `details`: why the newest version is not there yet, None if it is."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine. `silent_seconds`: since its last heartbeat.

    `version`: the label of its weights, with the versions of all slots. `pause_seconds_left`: None if no pause is
    leased, negative once the lease has expired.
    """

    id: int
    address: str
    state: EngineState
    version: str | None
    model_path: str
    silent_seconds: float
    pause_seconds_left: float | None
    details: JsonObject = field(default_factory=dict)
    engine_set: str = DEFAULT_SET

    @property
    def reachable(self) -> bool:
        """True if the engine serves, or is paused for new weights, and has sent a recent heartbeat."""
        return self.state in (EngineState.READY, EngineState.SYNCING) and self.silent_seconds < SILENT_SECONDS

    @property
    def fetch_error(self) -> str | None:
        """The reason why the engine's node cannot fetch the newest weights; None if it can."""
        return self.details.get(FETCH_ERROR)

    @property
    def checks_files(self) -> bool:
        """True if the engine's workers can compare digests before a pause (`engine/vllm_worker_extension.py`)."""
        return bool(self.details.get(CHECKS_FILES))

    def has_fetched(self, version: str) -> bool:
        """Return whether a version from an address is on the engine's node."""
        return version in self.details.get(FETCHED, [])


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """A published policy version: the address of its files, their digests, and the learner's canary scores."""

    version: str
    uri: str
    files: list[JsonObject]
    canary: JsonObject | None


_ROW = select(
    *columns_of(
        EngineRow,
        EngineTable,
        silent_seconds=seconds_of(func.now() - EngineTable.heartbeat_at),
        pause_seconds_left=seconds_of(EngineTable.paused_until - func.now()),
    )
)
_GONE = {"state": EngineState.GONE, "version": None}
_NOT_GONE = _ROW.where(EngineTable.state != EngineState.GONE).order_by(EngineTable.id)
_PAUSE_HOLDS = (EngineTable.state == EngineState.SYNCING) & (EngineTable.paused_until > func.now())


def _engine_row(row: Any) -> EngineRow:
    return replace(EngineRow(*row), state=EngineState(row.state))


async def register_engine(
    conn: AsyncConnection, address: str, model_path: str, details: JsonObject, engine_set: str = DEFAULT_SET
) -> int:
    """Return the id of the engine's row, in state `starting` without version or lease.

    An existing row of the same address belongs to an earlier process: that of the same set is reset, and those of other
    sets are `gone` from now on. Raises EngineUnavailableError if one of those has a lease: its holder changes weights.
    """
    other = (EngineTable.address == address) & (EngineTable.engine_set != engine_set)
    leased = _ROW.where(other, EngineTable.paused_until > func.now()).with_for_update()
    if (found := (await conn.execute(leased)).first()) is not None:
        raise EngineUnavailableError(
            f"{address} is still updated for engine set {found.engine_set}, for at most "
            f"{found.pause_seconds_left:.0f} s; register it for {engine_set} then"
        )
    await conn.execute(update(EngineTable).where(other).values(_GONE))
    values = {
        "state": EngineState.STARTING,
        "version": None,
        "model_path": model_path,
        "details": details,
        "paused_until": None,
    }
    statement = insert(EngineTable).values(address=address, engine_set=engine_set, **values)
    known = values | {"heartbeat_at": func.now()}
    statement = statement.on_conflict_do_update(index_elements=["address", "engine_set"], set_=known)
    return int((await conn.execute(statement.returning(EngineTable.id))).scalar_one())


async def heartbeat_engine(conn: AsyncConnection, engine_id: int) -> EngineRow | None:
    """Store a heartbeat and return the engine's row, which other processes may have changed; None if it is missing."""
    await conn.execute(update(EngineTable).where(EngineTable.id == engine_id).values(heartbeat_at=func.now()))
    return await get_engine(conn, engine_id)


async def get_engine(conn: AsyncConnection, engine_id: int) -> EngineRow | None:
    row = (await conn.execute(_ROW.where(EngineTable.id == engine_id))).one_or_none()
    return None if row is None else _engine_row(row)


async def list_engines(conn: AsyncConnection, engine_set: str) -> list[EngineRow]:
    """Return the set's engines that are not `gone`, oldest first."""
    return [_engine_row(row) for row in await conn.execute(_NOT_GONE.where(EngineTable.engine_set == engine_set))]


async def list_all_engines(conn: AsyncConnection) -> list[EngineRow]:
    """Return the engines of all sets that are not `gone`, oldest first."""
    return [_engine_row(row) for row in await conn.execute(_NOT_GONE)]


async def ready_engines(conn: AsyncConnection, engine_set: str) -> list[EngineRow]:
    """Return the set's engines in state `ready` with a recent heartbeat, oldest first."""
    found = await list_engines(conn, engine_set)
    return [row for row in found if row.state is EngineState.READY and row.silent_seconds < SILENT_SECONDS]


async def cannot_fetch(conn: AsyncConnection, engine_set: str) -> bool:
    """Return whether the node of some live engine of the set waits for weights that it cannot fetch."""
    found = await list_engines(conn, engine_set)
    return any(row.fetch_error and row.silent_seconds < SILENT_SECONDS for row in found)


async def set_engine_state(conn: AsyncConnection, engine_id: int, expected: EngineState, state: EngineState) -> bool:
    """Change the state from `expected` to `state`; return False if it was another. Leaving `syncing` ends the lease."""
    values: dict[str, object] = {"state": state}
    if expected is EngineState.SYNCING:
        values["paused_until"] = None
    statement = update(EngineTable).where(EngineTable.id == engine_id, EngineTable.state == expected).values(**values)
    return bool((await conn.execute(statement)).rowcount)


async def set_engine_gone(conn: AsyncConnection, engine_id: int) -> None:
    """Record that the vLLM process has ended, from any state.

    A lease stays, for at most FENCE_SECONDS: an attached vLLM goes on, and the holder may still write to it.
    """
    latest = func.now() + timedelta(seconds=FENCE_SECONDS)
    until = case((EngineTable.paused_until > latest, latest), else_=EngineTable.paused_until)
    await conn.execute(update(EngineTable).where(EngineTable.id == engine_id).values(_GONE | {"paused_until": until}))


async def set_engine_version(conn: AsyncConnection, engine_id: int, label: str | None) -> None:
    await _record_loads(conn, engine_id, label)
    await conn.execute(update(EngineTable).where(EngineTable.id == engine_id).values(version=label))


async def _record_loads(
    conn: AsyncConnection, engine_id: int, label: str | None, condition: ColumnElement[bool] | None = None
) -> None:
    """Record loads of versions in `label` that the row lacks, if it meets `condition`. Call it before the change."""
    for version in versions_of_label(label).values():
        named = func.array_position(func.string_to_array(EngineTable.version, SEPARATOR), version)
        wanted = (EngineTable.id == engine_id) & named.is_(None)
        loaded = select(EngineTable.id, literal(version)).where(wanted if condition is None else wanted & condition)
        await conn.execute(insert(EngineLoadTable).from_select(["engine_id", "version"], loaded))


async def set_engine_details(conn: AsyncConnection, engine_id: int, details: JsonObject) -> None:
    """Merge `details` into those of the engine's row."""
    merged = EngineTable.details.op("||")(literal(details, JSONB))
    await conn.execute(update(EngineTable).where(EngineTable.id == engine_id).values(details=merged))


async def canary_of(conn: AsyncConnection, version: str | None) -> JsonObject | None:
    """Return the learner's scores of the canary text under these weights; None for the initial weights."""
    return await conn.scalar(select(PolicyVersionTable.canary).where(PolicyVersionTable.version == version))


async def begin_engine_pause(conn: AsyncConnection, engine_id: int, seconds: float) -> bool:
    """Change `ready` to `syncing` with a lease of `seconds`; False if not ready. Call before pausing vLLM."""
    until = func.now() + timedelta(seconds=seconds)
    statement = update(EngineTable).where(EngineTable.id == engine_id, EngineTable.state == EngineState.READY)
    return bool((await conn.execute(statement.values(state=EngineState.SYNCING, paused_until=until))).rowcount)


async def extend_engine_pause(conn: AsyncConnection, engine_id: int, seconds: float) -> bool:
    """Extend a lease that has not expired; return False if the caller no longer holds the pause."""
    until = func.now() + timedelta(seconds=seconds)
    statement = update(EngineTable).where(EngineTable.id == engine_id, _PAUSE_HOLDS)
    return bool((await conn.execute(statement.values(paused_until=until))).rowcount)


async def end_engine_pause(
    conn: AsyncConnection, engine_id: int, label: str | None, state: EngineState = EngineState.READY
) -> bool:
    """Change `syncing` to `state` and record the served versions; False if the lease has expired."""
    await _record_loads(conn, engine_id, label, _PAUSE_HOLDS)
    statement = update(EngineTable).where(EngineTable.id == engine_id, _PAUSE_HOLDS)
    return bool((await conn.execute(statement.values(state=state, version=label, paused_until=None))).rowcount)


async def take_over_engine_pause(conn: AsyncConnection, engine_id: int, seconds: float) -> bool:
    """Take over an expired pause for the wrapper, so that no other process ends it; False if not expired."""
    lapsed = (EngineTable.state == EngineState.SYNCING) & (
        (EngineTable.paused_until < func.now()) | EngineTable.paused_until.is_(None)
    )
    until = func.now() + timedelta(seconds=seconds)
    statement = update(EngineTable).where(EngineTable.id == engine_id, lapsed)
    return bool((await conn.execute(statement.values(paused_until=until))).rowcount)


async def newest_published_policies(
    conn: AsyncConnection, engine_set: str, most: int | None = None, slot: int = FIRST_SLOT
) -> list[PublishedPolicy]:
    """Return the newest `most` versions of the open run that published last with this set and slot, newest first."""
    trains = (
        (RunTable.engine_set == engine_set)
        & (RunTable.lora_slot == slot)
        & RunTable.state.in_(OPEN_STATES)
        & (RunTable.config_name != ADHOC)
        & RunTable.source_run_id.is_(None)
        & RunTable.config["endpoint"].astext.is_(None)
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
        select(*columns_of(PublishedPolicy, PolicyVersionTable))
        .where(PolicyVersionTable.run_id == latest, PolicyVersionTable.state == PolicyVersionState.PUBLISHED)
        .order_by(PolicyVersionTable.step.desc(), PolicyVersionTable.epoch.desc())
        .limit(most)
    )
    return [PublishedPolicy(*row) for row in rows]
