"""Stages `learn.plan`, `learn.step` and `learn.sync`: plan a step, wait for the learner, bring the engines to its
weights.

No activity calls the learner: it reads plan rows from Postgres. These activities write the row and watch its state.
"""

import asyncio

import structlog
from temporalio import activity

from activities.run_configs import RunConfigs
from activities.stage import activity_stage, heartbeating
from engine.policy_files import is_address
from engine.weight_update import load_from_files, update_engine
from ratchet import paths
from ratchet.durations import duration_in_words
from ratchet.errors import BugError, LearnerLostError, StoreUnavailableError
from ratchet.lora_slots import version_in_label
from ratchet.payloads import EngineList, LearnedStep, Planned, RunInput, StageResult, StepInput, SyncInput
from ratchet.types import BatchState, EngineState, RunState
from scheduling import group_selection
from store import (
    engines,
    fork_report,
    learners,
    metrics,
    missing_verdicts,
    open_runs,
    plans,
    runs,
    step_mix,
    verdict_report,
)
from store.database import Database
from training import planner

_LOG = structlog.get_logger()

_POLL_SECONDS = 0.3
_LEARNER_LEASE_SECONDS = 180.0
_REPORT_SECONDS = 10.0


class LearnActivities:
    def __init__(self, database: Database, configs: RunConfigs) -> None:
        self.database = database
        self.configs = configs

    @activity_stage("learn.plan")
    async def plan(self, input: RunInput) -> Planned:
        """Write the next plan row of a running run in one transaction, or return the one that is not trained yet."""
        async with self.database.begin() as connection:
            await plans.lock_run_for_planning(connection, input.run_id)  # a change is seen by all plans after it
            row = await runs.the_run(connection, input.run_id)
            if row.state != RunState.RUNNING:  # paused or ended since TrainRun looked
                return Planned(step=None)
            config = await group_selection.config_in_force(connection, row)
            step = await planner.plan_step(connection, input.run_id, config)
            reason = await missing_verdicts.reason_to_pause(connection, input.run_id)
            if reason:
                await open_runs.pause_run(connection, input.run_id, reason)
        if step is not None:
            await self._record_reports(input.run_id, step)
        return Planned(step=step)

    async def _record_reports(self, run_id: str, step: int) -> None:
        """Record the reports on the step's forks and verdicts as metrics and log their alarms; give up after 10 s."""
        try:
            async with asyncio.timeout(_REPORT_SECONDS), self.database.begin() as connection:
                forks = await fork_report.fork_report(connection, run_id, step)
                verdicts = await verdict_report.verdict_report(connection, run_id, step)
                mixed = step_mix.mix_metrics(await step_mix.step_mix(connection, run_id, step))
                await metrics.record_metrics(connection, run_id, step, forks.numbers() | verdicts.numbers() | mixed)
        except (TimeoutError, StoreUnavailableError) as error:
            _LOG.warning("forks and verdicts not counted", run=run_id, step=step, reason=str(error))
            return
        for alarm in [*forks.alarms, *verdicts.alarms]:
            _LOG.warning("alarm", run=run_id, step=step, what=alarm)

    @activity_stage("learn.step")
    async def step(self, input: StepInput) -> LearnedStep:
        """Wait until the learner has trained the step and published its weights, a paused run is stopped before it, or
        the step is discarded.

        Raises LearnerLostError if the learner sends no heartbeat for 180 s.
        """
        started = asyncio.get_running_loop().time()
        while True:
            async with self.database.begin() as connection:
                run = await runs.get_run(connection, input.run_id)
                state = await plans.plan_state(connection, input.run_id, input.step)
                learner = await learners.get_learner(connection, input.run_id)
                published = await runs.newest_version(connection, input.run_id, input.step)
            if state in (BatchState.STEPPED, BatchState.COMMITTED) and published is not None:
                return LearnedStep(used_seconds=asyncio.get_running_loop().time() - started)
            is_last = run is not None and run.resolved_config.training.steps < input.step
            if is_last or state is None:  # a person has discarded its batch
                return LearnedStep(trained=False)
            waited = asyncio.get_running_loop().time() - started
            silent = learner.silent_seconds if learner else waited
            if silent > _LEARNER_LEASE_SECONDS:
                raise LearnerLostError(
                    f"the learner of {input.run_id} has been silent for {duration_in_words(silent)}; "
                    "see `ratchet admin logs learner`"
                )
            activity.heartbeat(
                f"{learner.phase}, silent for {duration_in_words(learner.silent_seconds)}"
                if learner
                else "waiting for the learner"
            )
            await asyncio.sleep(_POLL_SECONDS)

    @activity_stage("learn.engines")
    async def find_engines(self, input: RunInput) -> EngineList:
        """Return the engines of the run's set, which must receive its new weights; wait until there is one.

        Engines without a recent heartbeat are left out; their wrappers load the newest version when they return. A run
        that an endpoint answers has no weights, so none must.
        """
        config = await self.configs.of_run(input.run_id)
        if config.endpoint is not None:
            return EngineList(engine_ids=[])
        while True:
            found = await self.database.read(engines.list_engines, config.engine_set)
            usable = [engine.id for engine in found if engine.reachable]
            if usable:
                return EngineList(engine_ids=usable)
            activity.heartbeat(f"no engine of set {config.engine_set} is ready")
            await asyncio.sleep(_POLL_SECONDS)

    @activity_stage("learn.sync")
    async def sync(self, input: SyncInput) -> StageResult:
        """Bring the run's slot of one engine to the step's version in place; safe to repeat.

        An unreachable engine is skipped, because its wrapper starts from the newest published version, and so is one
        of another set. Waits without a pause until a version from an address is on the engine's node, and until the
        engine has compared the digests.
        """
        started = asyncio.get_running_loop().time()
        config = await self.configs.of_run(input.run_id)
        checked = None
        while True:
            async with self.database.begin() as connection:
                run = await runs.get_run(connection, input.run_id)
                engine = await engines.get_engine(connection, input.engine_id)
                version = await runs.newest_version(connection, input.run_id, input.step)
            if version is None or run is None:
                raise BugError(f"step {input.step} of {input.run_id} is not published")
            if engine is None or not engine.reachable or engine.engine_set != config.engine_set:
                return StageResult()
            served = version_in_label(engine.version, run.lora_slot)
            if served == version.version and engine.state is not EngineState.SYNCING:
                return StageResult(used_seconds=asyncio.get_running_loop().time() - started)
            if is_address(version.uri) and not engine.has_fetched(version.version):
                said = engine.fetch_error or "it has begun"
                activity.heartbeat(f"{engine.address} fetches {version.version}: {said}")
                await asyncio.sleep(_POLL_SECONDS)
                continue
            transfer = load_from_files(version, paths.policies(), run.lora_slot)
            if transfer == checked:
                break
            async with heartbeating():
                await transfer.check_before(engine)
            checked = transfer  # and look again, since the engine may have loaded it meanwhile
        async with heartbeating():
            await update_engine(self.database, engine, version, transfer, config.engine.keep_cache, run.lora_slot)
        return StageResult(used_seconds=asyncio.get_running_loop().time() - started)
