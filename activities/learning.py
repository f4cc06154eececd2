"""Stages `learn.plan`, `learn.step`, `learn.sync`: a batch is fixed, trained by the learner, and its weights reach the engines.

Why here: the learner is called by nobody, it reads plan rows; these activities write the row, watch it, and carry the weights over.
Called by: the `TrainRun` workflow.
"""

import asyncio

import structlog
from temporalio import activity

from activities.run_configs import RunConfigs
from activities.stage import activity_stage, heartbeating
from engine.weight_update import load_from_files, update_engine
from ratchet import paths
from ratchet.errors import BugError, LearnerLostError, StoreUnavailableError
from ratchet.payloads import EngineList, Planned, RunInput, StageResult, StepInput, SyncInput
from ratchet.store import engines, fork_report, learners, metrics, plans, runs
from ratchet.store.database import Database
from ratchet.types import BatchState, EngineState
from training import planner

_LOG = structlog.get_logger()

_POLL_SECONDS = 0.3
_LEARNER_LEASE_SECONDS = 180.0
_PUSHING_LEASE_SECONDS = 20.0
_WATCH_SECONDS = 10.0


class LearnActivities:
    def __init__(self, database: Database, configs: RunConfigs) -> None:
        self.database, self.configs = database, configs

    @activity_stage("learn.plan")
    async def plan(self, input: RunInput) -> Planned:
        """Writes the next plan row in one transaction, or finds the one that is not trained yet. `step` None: not enough groups."""
        config = await self.configs.of_run(input.run_id)
        async with self.database.begin() as connection:
            step = await planner.plan_step(connection, input.run_id, config)
        if step is not None:
            await self._watch_forks(input.run_id, step)
        return Planned(step=step)

    async def _watch_forks(self, run_id: str, step: int) -> None:
        """What `ratchet forks` shows, of this step's rollouts: beside its other numbers and, where something looks wrong, in the log.
        No step waits for its numbers."""
        try:
            async with asyncio.timeout(_WATCH_SECONDS), self.database.begin() as connection:
                found = await fork_report.fork_report(connection, run_id, step)
                await metrics.record_metrics(connection, run_id, step, found.numbers())
        except (TimeoutError, StoreUnavailableError) as error:
            _LOG.warning("forks not counted", run=run_id, step=step, reason=str(error))
            return
        for alarm in found.alarms:
            _LOG.warning("alarm", run=run_id, step=step, what=alarm)

    @activity_stage("learn.step")
    async def step(self, input: StepInput) -> StageResult:
        """Waits until the learner has trained the step and published its weights. Raises LearnerLostError where it is silent."""
        started = asyncio.get_running_loop().time()
        while True:
            async with self.database.begin() as connection:
                state = await plans.plan_state(connection, input.run_id, input.step)
                learner = await learners.get_learner(connection, input.run_id)
                published = await runs.newest_version(connection, input.run_id, input.step)
            if state in (BatchState.STEPPED, BatchState.COMMITTED) and published is not None:
                return StageResult(used_seconds=asyncio.get_running_loop().time() - started)
            waited = asyncio.get_running_loop().time() - started
            silent = learner.silent_seconds if learner else waited
            if silent > _LEARNER_LEASE_SECONDS:
                raise LearnerLostError(
                    f"the learner of {input.run_id} has been silent for {silent:.0f} s; see `ratchet logs learner`"
                )
            activity.heartbeat(
                f"{learner.phase}, silent for {learner.silent_seconds:.0f} s" if learner else "waiting for the learner"
            )
            await asyncio.sleep(_POLL_SECONDS)

    @activity_stage("learn.engines")
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

    @activity_stage("learn.sync")
    async def sync(self, input: SyncInput) -> StageResult:
        """Brings one engine to the step's version in place; idempotent by version. An engine that is gone needs nothing:
        its wrapper starts the next one from the newest published version.
        """
        async with heartbeating():
            started = asyncio.get_running_loop().time()
            config = await self.configs.of_run(input.run_id)
            while config.training.weight_transport == "nccl" and await self._is_pushed(input):
                await asyncio.sleep(_POLL_SECONDS)
            async with self.database.begin() as connection:
                engine = await engines.get_engine(connection, input.engine_id)
                version = await runs.newest_version(connection, input.run_id, input.step)
            if version is None:
                raise BugError(f"step {input.step} of {input.run_id} is not published")
            if engine is None or not engine.reachable:
                return StageResult()
            if engine.version != version.version or engine.state is EngineState.SYNCING:
                await update_engine(
                    self.database, engine, version, load_from_files(version, paths.policies()), config.engine.keep_cache
                )
            return StageResult(used_seconds=asyncio.get_running_loop().time() - started)

    async def _is_pushed(self, input: SyncInput) -> bool:
        """Whether the learner is still at sending these weights itself (`training/weight_broadcast.py`)."""
        async with self.database.begin() as connection:
            learner = await learners.get_learner(connection, input.run_id)
        if learner is None or learner.silent_seconds > _PUSHING_LEASE_SECONDS:
            return False
        return (learner.phase, learner.step) == (learners.PUBLISHING, input.step)
