"""Load new weights into a running engine: pause, start, transfer, finish with the label, resume, canary.

`replace_weights` is the only code that changes an engine's weights. Two callers use it:

- the engine wrapper (`engine/wrapper.py`), to catch up with the newest version,
- the activity `learn.sync`, which lets one engine read the version's files.

States of an engine (column `engine.state`) and the only transitions between them. Each is one statement in
`store/engines.py`; all but those to `starting` and `gone` name the state that they expect. A pause is a lease:
its holder writes `paused_until` first.

| from            | to          | by                | when                                                           |
|-----------------|-------------|-------------------|----------------------------------------------------------------|
| none, any       | starting    | wrapper           | it starts; the row loses its version and its lease             |
| any             | gone        | another's wrapper | of another set, takes the address, once no lease is left on it |
| starting        | ready       | wrapper           | vLLM is up with the newest version, and the canary passes      |
| ready           | syncing     | `learn.sync`      | takes a lease of 60 s before vLLM is paused                    |
| ready           | syncing     | wrapper           | missed a version at the start or in a silence; lease of 600 s  |
| syncing         | syncing     | `learn.sync`      | renews its lease every 15 s and before each phase              |
| syncing, lapsed | syncing     | wrapper           | takes over the pause, loads the newest version; lease of 600 s |
| syncing         | ready       | lease holder      | the weights are loaded and the canary passes                   |
| syncing         | quarantined | `learn.sync`      | the canary fails                                               |
| any             | gone        | wrapper           | it ends, also by itself after quarantine or a failed canary    |

An update changes one slot of an engine that several runs share, and pauses the calls of all. Only the holder of the
lease changes the label, so no update loses that of another slot.

Adapters send calls to `ready` engines only. A failed update is never resumed: its lease lapses, and the wrapper takes
over. An update that has lost its lease sends vLLM nothing more. A row that is `gone` keeps its lease for up to 60 s, in
which no other set gets the address, since a request of that update may still be on its way. The wrapper of an engine
whose row is `gone`, or whose vLLM has another label than its row, ends and registers anew.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from engine.canary import CanaryVerdict, judge_canary
from engine.client import EngineClient
from engine.policy_files import policy_directory, weight_files
from ratchet.background_task import errors_logged, running_beside
from ratchet.errors import EngineRejectedError, EngineUnavailableError, MachineError
from ratchet.lora_slots import FIRST_SLOT, label_of_versions, label_with, version_in_label, versions_of_label
from ratchet.types import EngineState, JsonObject
from store import engines, metrics, open_runs
from store.database import Database
from store.engines import EngineRow, PublishedPolicy
from store.schema import PolicyVersionTable

_LOG = structlog.get_logger()

PAUSE_SECONDS = 60.0
"""Lease of a pause by `learn.sync`, and the time limit of its short calls."""

Transfer = Callable[[EngineClient], Awaitable[None]]
"""Moves the tensors into the engine, after the update has started and before it is finished."""


@dataclass(slots=True, frozen=True)
class FilesTransfer:
    """A transfer in which the engine reads files. `files`: relative to the root of all policies; `slot`: whose."""

    files: tuple[str, ...]
    sha256: tuple[str, ...]
    slot: int

    async def __call__(self, client: EngineClient) -> None:
        await client.update(self.files, self.sha256, self.slot)

    async def check_before(self, engine: EngineRow) -> None:
        """Compare digests while calls go on, if the engine can. Raises EngineUnavailableError if one differs."""
        if not engine.checks_files:
            return
        async with EngineClient(engine.address) as client:
            if not await client.check_files(self.files, self.sha256):
                _LOG.warning("digests not compared before the pause", engine=engine.address, files=self.files)


def load_from_files(version: PolicyVersionTable | PublishedPolicy, root: Path, slot: int = FIRST_SLOT) -> FilesTransfer:
    """Return a transfer in which the engine checks all digests and then reads the version's files, for this slot.

    `root`: the directory below which all policies are published, on this machine. `engine/policy_fetcher.py` brings a
    version from an address to the same relative path on the engine's node. Raises MachineError if the
    version lies outside of the root.
    """
    directory = policy_directory(version.uri, root).resolve()
    if not directory.is_relative_to(root.resolve()):
        raise MachineError(
            f"policy {version.version} lies in {directory}, outside of {root.resolve()}; "
            "start the engine with the root it was published to"
        )
    base = directory.relative_to(root.resolve())
    weights = weight_files(version.files)
    names = tuple(str(base / file["name"]) for file in weights)
    return FilesTransfer(names, tuple(file["sha256"] for file in weights), slot)


_ANY_LABEL: Any = object()


async def _always_allowed() -> None:
    """The check of a caller that alone knows the engine."""


async def replace_weights(
    client: EngineClient,
    label: str,
    transfer: Transfer,
    keep_cache: bool = False,
    close_open_update: bool = False,
    label_before: str | None = _ANY_LABEL,
    before_phase: Callable[[], Awaitable[None]] = _always_allowed,
) -> None:
    """Pause vLLM, transfer new weights, set the label of all slots and resume. If it raises, vLLM stays paused.

    `keep_cache` keeps the KV cache of running requests. `close_open_update` first closes an update that another process
    left open; only the wrapper may do that, since no other update can run then. `label_before`: the label that `label`
    was made from; if vLLM has another one, another process has updated a slot since, whose version `label` would deny.
    `before_phase` is awaited before vLLM is paused, receives weights, gets the label and is resumed; it raises if the
    engine is no longer the caller's, whose next request would change the weights of its successor.

    Raises EngineUnavailableError for another label, before a weight is changed, and if a phase fails.
    """
    await before_phase()
    await client.pause(mode="keep", clear_cache=not keep_cache)
    try:
        await client.start_update()
    except (EngineUnavailableError, EngineRejectedError):
        if not close_open_update:
            raise
        await client.finish_update(None)
        await client.start_update()
    # While this update is open, vLLM starts no other one.
    if label_before is not _ANY_LABEL and (found := await client.version()) != label_before:
        await client.finish_update(None)
        raise EngineUnavailableError(
            f"engine {client.address} serves {found}, not {label_before}: it was updated since this update began"
        )
    await before_phase()
    await transfer(client)
    await before_phase()
    await client.finish_update(label)
    await before_phase()
    await client.resume()


async def score_canary(
    client: EngineClient, canary: JsonObject, before: JsonObject | None = None, slot: int = FIRST_SLOT
) -> CanaryVerdict:
    """Let a slot of the engine score the canary text, and compare with the learner's scores."""
    return judge_canary(await client.score(canary["ids"], slot), canary, before)


async def update_engine(
    database: Database,
    engine: EngineRow,
    version: PolicyVersionTable,
    transfer: Transfer,
    keep_cache: bool,
    slot: int = FIRST_SLOT,
) -> None:
    """Bring one slot of a ready engine to `version` under a leased pause, for `learn.sync`.

    Raises EngineUnavailableError if the engine is not ready, if the slot is no longer that of the version's run, if a
    phase fails, or if the lease was lost meanwhile.
    """
    held, label = await _begin_pause(database, engine, version, slot)
    clock = asyncio.get_running_loop().time
    started = clock()
    async with (
        EngineClient(engine.address, timeout_seconds=PAUSE_SECONDS) as client,
        running_beside(_renew_lease(database, engine)),
    ):
        extend = partial(_extend_lease, database, engine)
        await replace_weights(client, label, transfer, keep_cache, label_before=held.version, before_phase=extend)
        paused = clock() - started
        state = await _canary_state(database, client, held, version, slot, started)
        async with database.begin() as connection:
            if not await engines.end_engine_pause(connection, engine.id, label, state):
                raise EngineUnavailableError(f"engine {engine.address}: the pause ran out during the update")
            took = {"sync_pause_seconds": paused, "sync_seconds": clock() - started}
            await metrics.record_metrics(connection, version.run_id, version.step, took, keep_highest=True)


class _Pause(NamedTuple):
    """A pause that has begun: the engine's row, and the label that it has after the update."""

    row: EngineRow
    label: str


async def _begin_pause(database: Database, engine: EngineRow, version: PolicyVersionTable, slot: int) -> _Pause:
    """Take the lease; from now on only this caller changes the engine's label.

    The new label keeps the versions of open runs alone: if the update brings another base, the slot of a run that has
    ended has no longer its adapter.
    """
    async with database.begin() as connection:
        if not await open_runs.has_slot(connection, version.run_id, slot):
            raise EngineUnavailableError(
                f"LoRA slot {slot} of engine {engine.address} is no longer that of {version.run_id}"
            )
        begun = await engines.begin_engine_pause(connection, engine.id, PAUSE_SECONDS)
        row = await engines.get_engine(connection, engine.id)
        opened = await open_runs.open_slots(connection, engine.engine_set)
    if not begun or row is None:
        raise EngineUnavailableError(f"engine {engine.address} is {engine.state}, not ready for an update")
    served = versions_of_label(row.version)
    kept = {one: named for one, named in served.items() if named.startswith(f"{opened.get(one)}/")}
    return _Pause(row, label_with(label_of_versions(kept), slot, version.version))


async def _extend_lease(database: Database, engine: EngineRow) -> None:
    """Extend the lease. Raises EngineUnavailableError if it was lost: the wrapper or another set has the engine."""
    if not await database.run(engines.extend_engine_pause, engine.id, PAUSE_SECONDS):
        raise EngineUnavailableError(f"engine {engine.address}: the pause ran out during the update")


async def _renew_lease(database: Database, engine: EngineRow) -> None:
    """Renew the lease four times per PAUSE_SECONDS until cancelled or lost, which the next phase finds."""
    while True:
        await asyncio.sleep(PAUSE_SECONDS / 4)
        with errors_logged("the pause's lease not renewed", engine=engine.address):
            try:
                await _extend_lease(database, engine)
            except EngineUnavailableError:
                return


async def _canary_state(
    database: Database,
    client: EngineClient,
    engine: EngineRow,
    version: PolicyVersionTable,
    slot: int,
    paused_at: float,
) -> EngineState:
    """Return READY if the canary passes, else QUARANTINED; record the gaps with the engine and the step.

    The canary's call samples one token, so it also measures the time to the first token after the pause.
    """
    if version.canary is None:
        return EngineState.READY
    before = await database.run(engines.canary_of, version_in_label(engine.version, slot))
    verdict = await score_canary(client, version.canary, before, slot)
    answered = asyncio.get_running_loop().time() - paused_at
    gaps = {
        "canary_gap_mean": verdict.mean_gap,
        "canary_gap_max": verdict.max_gap,
        "sync_first_token_seconds": answered,
    }
    async with database.begin() as connection:
        details = {"canary": {"version": version.version, **asdict(verdict)}}
        await engines.set_engine_details(connection, engine.id, details)
        await metrics.record_metrics(connection, version.run_id, version.step, gaps, keep_highest=True)
    if verdict.reason is None:
        return EngineState.READY
    _LOG.error("engine quarantined", engine=engine.address, version=version.version, reason=verdict.reason)
    return EngineState.QUARANTINED
