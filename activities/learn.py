"""Stages `learn.plan`, `learn.step`, `learn.sync`: a batch is fixed, trained by the learner, and its weights reach the engines.

Why here: the learner is called by nobody, it reads plan rows; these activities write the row, watch it, and carry the weights over.
Called by: the `TrainRun` workflow.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import structlog
from temporalio import activity

from activities.boundary import beside, heartbeating, stage
from activities.run_configs import RunConfigs
from ratchet import paths
from ratchet.engine_client import EngineClient
from ratchet.errors import BugError, EngineUnavailableError, LearnerLostError, StoreUnavailableError
from ratchet.payloads import EngineList, Planned, RunInput, StageResult, StepInput, SyncInput
from ratchet.store import engines, forks, learners, metrics, runs
from ratchet.store.database import Database
from ratchet.store.schema import PolicyVersion
from ratchet.types import BatchState, EngineState
from training import batch, canary

log = structlog.get_logger()

_POLL_SECONDS = 0.3
_LEARNER_LEASE_SECONDS = 180.0
_PAUSE_SECONDS = 60.0
_WATCH_SECONDS = 10.0


class LearnActivities:
    def __init__(self, database: Database, configs: RunConfigs) -> None:
        self.database, self.configs = database, configs

    @stage("learn.plan")
    async def plan(self, input: RunInput) -> Planned:
        """Writes the next plan row in one transaction, or finds the one that is not trained yet. `step` None: not enough groups."""
        config = await self.configs.of_run(input.run_id)
        async with self.database.begin() as connection:
            step = await batch.plan_step(connection, input.run_id, config)
        if step is not None:
            await self._watch_forks(input.run_id, step)
        return Planned(step=step)

    async def _watch_forks(self, run_id: str, step: int) -> None:
        """What `ratchet forks` shows, of this step's rollouts: beside its other numbers and, where something looks wrong, in the log.
        No step waits for its numbers."""
        try:
            async with asyncio.timeout(_WATCH_SECONDS), self.database.begin() as connection:
                found = await forks.of_run(connection, run_id, step)
                await metrics.record(connection, run_id, step, found.numbers())
        except (TimeoutError, StoreUnavailableError) as error:
            log.warning("forks not counted", run=run_id, step=step, reason=str(error))
            return
        for alarm in found.alarms:
            log.warning("alarm", run=run_id, step=step, what=alarm)

    @stage("learn.step")
    async def step(self, input: StepInput) -> StageResult:
        """Waits until the learner has trained the step and published its weights. Raises LearnerLostError where it is silent."""
        started = asyncio.get_running_loop().time()
        while True:
            async with self.database.begin() as connection:
                state = await batch.state(connection, input.run_id, input.step)
                learner = await learners.get(connection, input.run_id)
                published = await runs.newest_version(connection, input.run_id, input.step)
            if state in (BatchState.STEPPED, BatchState.COMMITTED) and published is not None:
                return StageResult(used_seconds=asyncio.get_running_loop().time() - started)
            waited = asyncio.get_running_loop().time() - started
            silent = learner.silent_seconds if learner else waited
            if silent > _LEARNER_LEASE_SECONDS:
                raise LearnerLostError(f"the learner of {input.run_id} has been silent for {silent:.0f} s; see `ratchet logs learner`")
            activity.heartbeat(f"{learner.phase}, silent for {learner.silent_seconds:.0f} s" if learner else "waiting for the learner")
            await asyncio.sleep(_POLL_SECONDS)

    @stage("learn.engines")
    async def find_engines(self, input: RunInput) -> EngineList:
        """Engines that must be brought to a new version; waits for the first one. A silent one is left out: whenever its wrapper is heard
        of again it brings itself to the newest version first."""
        while True:
            async with self.database.begin() as connection:
                found = await engines.list_engines(connection)
            usable = [engine.id for engine in found if engine.reachable]
            if usable:
                return EngineList(engine_ids=usable)
            activity.heartbeat("no engine is ready")
            await asyncio.sleep(_POLL_SECONDS)

    @stage("learn.sync")
    async def sync(self, input: SyncInput) -> StageResult:
        """Brings one engine to the step's version in place; idempotent by version. An engine that is gone needs nothing:
        its wrapper starts the next one from the newest published version.
        """
        async with heartbeating():
            started = asyncio.get_running_loop().time()
            async with self.database.begin() as connection:
                engine = await engines.get(connection, input.engine_id)
                version = await runs.newest_version(connection, input.run_id, input.step)
            if version is None:
                raise BugError(f"step {input.step} of {input.run_id} is not published")
            if engine is None or not engine.reachable:
                return StageResult()
            if engine.version != version.version or engine.state is EngineState.SYNCING:
                config = await self.configs.of_run(input.run_id)
                await self._update(engine, version, config.engine.keep_cache)
            return StageResult(used_seconds=asyncio.get_running_loop().time() - started)

    async def _update(self, engine: engines.EngineRow, version: PolicyVersion, keep_cache: bool) -> None:
        """Pause, four phases, resume. Never resumed between start and finish: a try that fails leaves the lease to run out, and the
        wrapper then brings the engine to the newest version by itself.
        """
        async with self.database.begin() as connection:
            if not await engines.begin_pause(connection, engine.id, _PAUSE_SECONDS):
                raise EngineUnavailableError(f"engine {engine.address} is {engine.state}, not ready for an update")
        base = Path(version.uri).relative_to(paths.policies())
        clock = asyncio.get_running_loop().time
        started = clock()
        async with EngineClient(engine.address, timeout_seconds=_PAUSE_SECONDS) as client, beside(self._hold(engine.id)):
            await client.pause(mode="keep", clear_cache=not keep_cache)
            await client.start_update()
            weights = [file for file in version.files if file["name"].endswith(".safetensors")]
            await client.update([str(base / file["name"]) for file in weights], [file["sha256"] for file in weights])
            await client.finish_update(version.version)
            await client.resume()
            paused = clock() - started
            state = await self._examine(client, engine, version, started)
            async with self.database.begin() as connection:
                if not await engines.end_pause(connection, engine.id, version.version, state):
                    raise EngineUnavailableError(f"engine {engine.address}: the pause ran out during the update")
                took = {"sync_pause_seconds": paused, "sync_seconds": clock() - started}
                await metrics.record(connection, version.run_id, version.step, took, keep_highest=True)

    async def _hold(self, engine_id: int) -> None:
        """Keeps the pause ours, however long the weights take: its lease runs out with this process."""
        while True:
            await asyncio.sleep(_PAUSE_SECONDS / 4)
            with contextlib.suppress(StoreUnavailableError):
                async with self.database.begin() as connection:
                    await engines.extend_pause(connection, engine_id, _PAUSE_SECONDS)

    async def _examine(self, client: EngineClient, engine: engines.EngineRow, version: PolicyVersion, paused_at: float) -> EngineState:
        """The canary: an engine that does not answer as the learner does takes no more calls; its wrapper starts it anew. With its answer
        comes one sampled token, the first that we see after the pause.
        """
        if version.canary is None:
            return EngineState.READY
        before = await self._canary_before(engine)
        scores = await client.score(version.canary["ids"])
        answered = asyncio.get_running_loop().time() - paused_at
        verdict = canary.judge(scores, version.canary, before)
        found = {"canary": {"version": version.version, "mean_gap": verdict.mean_gap, "max_gap": verdict.max_gap, "reason": verdict.reason}}
        gaps = {"canary_gap_mean": verdict.mean_gap, "canary_gap_max": verdict.max_gap, "sync_first_token_seconds": answered}
        async with self.database.begin() as connection:
            await engines.set_details(connection, engine.id, found)
            await metrics.record(connection, version.run_id, version.step, gaps, keep_highest=True)
        if verdict.reason is None:
            return EngineState.READY
        log.error("engine quarantined", engine=engine.address, version=version.version, reason=verdict.reason)
        return EngineState.QUARANTINED

    async def _canary_before(self, engine: engines.EngineRow) -> dict[str, Any] | None:
        async with self.database.begin() as connection:
            return await engines.canary_of(connection, engine.version)
