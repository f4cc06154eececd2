"""Brings one engine to a published version in place: pause, four phases, canary, and back into service.

Why here: what an engine reads itself and what the learner sends it (`push.py`) arrive by the same steps; only the bytes take another way.
Called by: `learn.sync`, `training/weight_broadcast.py`. No torch here.

    ready ─▶ paused under a lease ─▶ start ─▶ bytes ─▶ finish, with the label ─▶ resume ─▶ canary ─▶ ready, or quarantined
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from engine import canary
from engine.client import EngineClient
from engine.policy_files import weight_files
from ratchet.background_task import running_beside
from ratchet.errors import EngineUnavailableError, StoreUnavailableError
from ratchet.store import engines, metrics
from ratchet.store.database import Database
from ratchet.store.schema import PolicyVersionTable
from ratchet.types import EngineState

_LOG = structlog.get_logger()

PAUSE_SECONDS = 60.0

Transfer = Callable[[EngineClient], Awaitable[None]]
"""Moves the bytes, between start and finish."""


def load_from_files(version: PolicyVersionTable, root: Path) -> Transfer:
    """The engine reads the version's files itself, once all their digests are right. `root`: of all policies, as this machine sees it."""
    base = Path(version.uri).relative_to(root)
    weights = weight_files(version.files)

    async def transfer(client: EngineClient) -> None:
        await client.update([str(base / file["name"]) for file in weights], [file["sha256"] for file in weights])

    return transfer


async def update_engine(
    database: Database, engine: engines.EngineRow, version: PolicyVersionTable, transfer: Transfer, keep_cache: bool
) -> None:
    """Never resumed between start and finish: a try that fails leaves the lease to run out, and the wrapper then brings the engine to the
    newest version by itself. Raises EngineUnavailableError where the engine is not ready, or the pause is not ours any more.
    """
    async with database.begin() as connection:
        if not await engines.begin_engine_pause(connection, engine.id, PAUSE_SECONDS):
            raise EngineUnavailableError(f"engine {engine.address} is {engine.state}, not ready for an update")
    clock = asyncio.get_running_loop().time
    started = clock()
    async with (
        EngineClient(engine.address, timeout_seconds=PAUSE_SECONDS) as client,
        running_beside(_hold(database, engine.id)),
    ):
        await client.pause(mode="keep", clear_cache=not keep_cache)
        await client.start_update()
        await transfer(client)
        await client.finish_update(version.version)
        await client.resume()
        paused = clock() - started
        state = await _examine(database, client, engine, version, started)
        async with database.begin() as connection:
            if not await engines.end_engine_pause(connection, engine.id, version.version, state):
                raise EngineUnavailableError(f"engine {engine.address}: the pause ran out during the update")
            took = {"sync_pause_seconds": paused, "sync_seconds": clock() - started}
            await metrics.record_metrics(connection, version.run_id, version.step, took, keep_highest=True)


async def _hold(database: Database, engine_id: int) -> None:
    """Keeps the pause ours, however long the weights take: its lease runs out with this process."""
    while True:
        await asyncio.sleep(PAUSE_SECONDS / 4)
        with contextlib.suppress(StoreUnavailableError):
            async with database.begin() as connection:
                await engines.extend_engine_pause(connection, engine_id, PAUSE_SECONDS)


async def _examine(
    database: Database, client: EngineClient, engine: engines.EngineRow, version: PolicyVersionTable, paused_at: float
) -> EngineState:
    """The canary: an engine that does not answer as the learner does takes no more calls; its wrapper starts it anew. With its answer
    comes one sampled token, the first that we see after the pause.
    """
    if version.canary is None:
        return EngineState.READY
    before = await _canary_before(database, engine)
    scores = await client.score(version.canary["ids"])
    answered = asyncio.get_running_loop().time() - paused_at
    verdict = canary.judge_canary(scores, version.canary, before)
    found = {
        "canary": {
            "version": version.version,
            "mean_gap": verdict.mean_gap,
            "max_gap": verdict.max_gap,
            "reason": verdict.reason,
        }
    }
    gaps = {
        "canary_gap_mean": verdict.mean_gap,
        "canary_gap_max": verdict.max_gap,
        "sync_first_token_seconds": answered,
    }
    async with database.begin() as connection:
        await engines.set_engine_details(connection, engine.id, found)
        await metrics.record_metrics(connection, version.run_id, version.step, gaps, keep_highest=True)
    if verdict.reason is None:
        return EngineState.READY
    _LOG.error("engine quarantined", engine=engine.address, version=version.version, reason=verdict.reason)
    return EngineState.QUARANTINED


async def _canary_before(database: Database, engine: engines.EngineRow) -> dict[str, Any] | None:
    async with database.begin() as connection:
        return await engines.canary_of(connection, engine.version)
