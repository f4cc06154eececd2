"""The activities of the TrainRun workflow: prepare a run, advance it each time the workflow wakes, and end it."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client

from activities.box_lifecycle import box_ttl_seconds
from activities.run_configs import RunConfigs
from activities.run_creation import create_run_from_config
from activities.sandbox_probe import PATIENCE_SECONDS, SandboxProbe
from activities.stage import activity_stage, heartbeating
from activities.steering import apply_to_run, apply_to_target, run_of
from activities.temporal_ui_details import describe_situation, viewer_link
from ratchet import paths, temporal_client
from ratchet.config import RunConfig
from ratchet.config_sources import load_config, resolve_config
from ratchet.disk_space import free_space
from ratchet.errors import ConfigError, LearnerLostError
from ratchet.grading_payloads import LabelledTask
from ratchet.payloads import (
    EndRunInput,
    PauseRunInput,
    PrepareRunInput,
    RunEnded,
    RunInput,
    RunningGroups,
    RunPlan,
    RunView,
    StageResult,
    StartedGroup,
    ViewRunInput,
)
from ratchet.steering_payloads import SteerRunInput, SteerRunResult, SteerTargetInput
from ratchet.stored_config import read_stored_config
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import OPEN_STATES, Purpose, RunState, Wish
from scheduling import circuit_breaker, group_selection
from scheduling.fork_selection import with_forks
from scheduling.quarantine import quarantined_tasks
from scheduling.task_selection import choose_tasks, mix_datasets
from store import box_failures, evaluations, groups, metrics, open_runs, plans, runs, steering, tasks, training_groups
from store.database import Database
from store.evaluation_plans import evaluations_of_step
from store.groups import NewGroup

_LOG = structlog.get_logger()

_CHECKPOINT_SECONDS = 20.0
_POLL_SECONDS = 0.3
_MIX_STEPS = 10
"""The datasets' shares are kept over the groups of so many steps, so that a changed weight acts within these."""


@dataclass(eq=False, repr=False)
class RunActivities:
    database: Database
    settings: TemporalSettings
    configs: RunConfigs
    client: Client
    _probe: SandboxProbe | None = None
    """Tries the sandbox service before a run begins; None to believe in it."""

    def __post_init__(self) -> None:
        self._tried: set[str] = set()
        """Runs whose sandbox service is good enough, as far as is known, or that have begun."""

    @activity_stage("prepare_run")
    async def prepare_run(self, input: PrepareRunInput) -> RunPlan:
        """Create the run if it does not exist, and return the numbers that its workflow needs. Safe to repeat.

        Raises ConfigError or DatasetError for a run that cannot be created, or a `run_id` that does not exist.
        """
        run_id = input.input.run_id or input.run_id
        async with heartbeating():
            row = await self.database.run(runs.get_run, run_id)
            if row is not None:
                config = read_stored_config(row.config)
            elif input.input.run_id is not None:
                raise ConfigError(f"run {run_id} does not exist; `ratchet show runs` lists those that do")
            else:
                config, path = _config_of(input), input.input.config_path
                name = Path(path).stem if path else input.run_id.rsplit("-", 2)[0]
                await create_run_from_config(self.database, self.settings, run_id, config, name)
            await self._try_service(run_id, PATIENCE_SECONDS)
        training = config.training
        return RunPlan(
            run_id=run_id,
            stages=self.settings.all_stages(config.limits.workspace_seconds, config.limits.eval_seconds),
            poll_seconds=self.settings.train_run.poll,
            steps_per_execution=self.settings.train_run.steps_per_execution,
            summary=f"{training.steps} steps of {training.groups_per_step} groups × {training.group_size} rollouts"
            + viewer_link(f"/runs/{run_id}"),
        )

    @activity_stage("view_run")
    async def advance_run(self, input: ViewRunInput) -> RunView:
        """Do the book-keeping between two decisions of TrainRun, in one transaction, and return the run's state.

        Consumes groups without signal, pauses a run whose groups all fail, and makes as many new groups as the
        staleness bound allows, unless the run is paused, stopping or ended.
        """
        if input.make_groups and input.run_id not in self._tried:
            await self._try_service(input.run_id, 0.0)
        async with self.database.begin() as connection:
            await plans.lock_run_for_planning(connection, input.run_id)
            row = await runs.the_run(connection, input.run_id)
            config = row.resolved_config
            await group_selection.consume_without_signal(connection, input.run_id, config)
            await group_selection.pause_if_all_fail(connection, input.run_id, config.training)
            row = await runs.the_run(connection, input.run_id)
            if input.make_groups and row.wish == Wish.NONE and row.state == RunState.RUNNING:
                await self._make_groups(connection, input.run_id, config)
                row = await runs.the_run(connection, input.run_id)
            in_force = await group_selection.config_in_force(connection, row)
            plannable = await group_selection.plannable(connection, input.run_id, in_force)
            open_groups = await runs.open_groups(connection, input.run_id)
            if row.wish == Wish.DRAIN and row.state == RunState.RUNNING and not open_groups and not plannable:
                await steering.end_drained(connection, input.run_id)
                row = await runs.the_run(connection, input.run_id)
            begun = await evaluations.begun_evaluations(connection, input.run_id)
            asked = await evaluations.asked_evaluations(connection, input.run_id)
            step = await runs.published_step(connection, input.run_id)
            situation = await describe_situation(connection, row)
            batch_reward_mean = await metrics.read_metric(connection, input.run_id, step, "reward_mean")
        started = [
            StartedGroup(
                group_id=group.id,
                workflow_id=group.workflow_id,
                task=group.task_label,
                harness=config.harness.name,
                step=group.started_step,
            )
            for group in open_groups
        ]
        return RunView(
            step=step,
            open_groups=started,
            plannable=plannable,
            wish=Wish(row.wish),
            evaluations_begun=[one.label for one in begun],
            evaluations_ended=sorted(one.label for one in begun if one.has_ended),
            state=RunState(row.state),
            reason=row.state_reason,
            last_step=row.resolved_config.training.steps,
            num_steps=read_stored_config(row.config).training.steps,
            evaluations=evaluations_of_step(read_stored_config(row.config), step, begun, asked),
            situation=situation,
            batch_reward_mean=batch_reward_mean,
        )

    async def _try_service(self, run_id: str, patience_seconds: float) -> None:
        """Pause a running run that has no groups yet if the service lacks what it needs; again after it was resumed."""
        async with self.database.begin() as connection:
            row = await runs.get_run(connection, run_id)
            image = await tasks.first_image(connection, run_id)
        if row is not None and row.next_group_no:
            self._tried.add(run_id)
            return
        if self._probe is None or image is None or row is None or row.state != RunState.RUNNING:
            return
        offered = self._probe.provider.capabilities
        if offered.without:
            _LOG.warning("this run does without some guarantees of a sandbox service", run=run_id, what=offered.without)
        try:
            config = read_stored_config(row.config)
            ttl_seconds = box_ttl_seconds(config, self.settings, offered.max_ttl_seconds)
            problem = await self._probe.problem(image, ttl_seconds, patience_seconds, config.sandbox.network)
        except ConfigError as error:
            problem = str(error)
        if not problem:
            self._tried.add(run_id)
        else:
            await self.database.run(open_runs.pause_run, run_id, problem)

    async def _make_groups(self, connection: AsyncConnection, run_id: str, config: RunConfig) -> None:
        """Make as many groups as `group_selection.groups_to_start`, the disk and the circuit breaker allow.

        The run's row then says why groups are held back. If the disk is almost full, or every task is in quarantine,
        the run is paused.
        """
        space = free_space(paths.home())
        limits = self.settings.train_run
        is_short = space.free_bytes < limits.enough_free_gb * 1e9
        if is_short and space.share < limits.pause_below_free:
            await open_runs.pause_run(connection, run_id, f"{space} is free; make room, then resume the run")
            return
        training = config.training
        counts = await runs.count_groups(connection, run_id)
        planned = await plans.newest_planned_step(connection, run_id)
        published = await runs.published_step(connection, run_id)
        seen = await training_groups.count_consumed_groups(connection, run_id, planned + 1)
        wanted = group_selection.groups_to_start(
            training, published, planned, counts.get("open", 0), counts.get("ready", 0), seen
        )
        num_open = await runs.count_open_members(connection, run_id)
        room = group_selection.groups_with_room(num_open, config.sandbox.max_open_rollouts, training.group_size)
        wanted = min(wanted, room)
        reason = ""
        if wanted and is_short and space.share < limits.hold_back_below_free:
            reason, wanted = f"only {space} is free", 0
        elif wanted:
            reason = circuit_breaker.reason_to_hold_back(await box_failures.count_boxes(connection))
        await runs.set_waiting_reason(connection, run_id, f"new groups are held back: {reason}" if reason else "")
        newest_seconds = await training_groups.seconds_since_newest_group(connection, run_id) if reason else None
        count = circuit_breaker.groups_allowed(wanted, reason, newest_seconds)
        if count:
            await _create_groups(connection, run_id, config, published, count)

    @activity_stage("find_running_groups")
    async def find_running_groups(self, input: RunInput) -> RunningGroups:
        """Ask Temporal which workflows of the run's open groups have not ended."""
        open_groups = await self.database.run(runs.open_groups, input.run_id)
        found = await temporal_client.open_workflows(self.client, {group.workflow_id for group in open_groups})
        return RunningGroups(workflow_ids=sorted(found))

    @activity_stage("pause_run")
    async def pause_run(self, input: PauseRunInput) -> StageResult:
        """Pause the run until a person resumes it; a run that is not running keeps its state and reason."""
        await self.database.run(open_runs.pause_run, input.run_id, input.reason)
        _LOG.warning("run paused", run=input.run_id, reason=input.reason)
        return StageResult()

    @activity_stage("end_run")
    async def end_run(self, input: EndRunInput) -> RunEnded:
        """Set the run's final state, for `done` and `stopped` only after its last checkpoint is committed.

        A run that a person has asked to evaluate since its end was decided goes on, unless it is stopped. Raises
        LearnerLostError, which is retried, if the checkpoint does not come within 20 s.
        """
        if input.state in (RunState.DONE, RunState.STOPPED):
            await self._wait_for_checkpoint(input.run_id, input.last_step)
        async with self.database.begin() as connection:
            if input.last_step is not None and await _is_to_be_evaluated(connection, input.run_id):
                return RunEnded(ended=False)
            ended = await runs.end_run(connection, input.run_id, input.state, input.reason, input.last_step)
            if ended and input.state is not RunState.DONE:
                await groups.cancel_unstarted_groups(connection, input.run_id)
        return RunEnded(ended=ended)

    async def _wait_for_checkpoint(self, run_id: str, decided_step: int | None) -> None:
        """Wait for the checkpoint of the last step, unless that is another one than when the end was decided.

        A paused run that is stopped may have no learner that writes it, and ends without.
        """
        end = asyncio.get_running_loop().time() + _CHECKPOINT_SECONDS
        while True:
            row = await self.database.run(runs.the_run, run_id)
            last_step = row.resolved_config.training.steps
            if row.checkpoint_step >= last_step or row.state not in OPEN_STATES:
                return
            if decided_step is not None and decided_step != last_step:
                return
            if asyncio.get_running_loop().time() > end:
                if row.state == RunState.PAUSED and row.wish == Wish.STOP:
                    return
                raise LearnerLostError(
                    f"the checkpoint of step {last_step} of {run_id} is not complete yet; see "
                    "`ratchet admin logs learner`"
                )
            await asyncio.sleep(_POLL_SECONDS)

    @activity_stage("steer_run")
    async def steer_run(self, input: SteerRunInput) -> SteerRunResult:
        """Record what a person asks of the run by an update. Raises ConfigError with the reason of a refusal."""
        answer = await apply_to_run(self.database, self.settings, input)
        _LOG.info("steered", run=input.run_id, action=input.action, by=input.by, what=answer.text)
        return SteerRunResult(text=answer.text, changed=answer.changed)

    @activity_stage("steer_target")
    async def steer_target(self, input: SteerTargetInput) -> SteerRunResult:
        """Cancel or retry one group or rollout of the run. Raises ConfigError with the reason of a refusal."""
        run_id = await run_of(self.database, input.what)
        if run_id != input.run_id:
            raise ConfigError(f"{input.what} belongs to run {run_id}, not to run {input.run_id}; ask run/{run_id}")
        answer = await apply_to_target(
            self.database, self.client, input.action, input.what, input.request_id, input.by, input.reason
        )
        return SteerRunResult(text=answer.text, changed=answer.changed)


async def _is_to_be_evaluated(connection: AsyncConnection, run_id: str) -> bool:
    """Lock the run; return whether people have asked for evaluations of its newest step, unless it is stopped."""
    is_open = await plans.lock_run_for_planning(connection, run_id)
    row = await runs.the_run(connection, run_id)
    if not is_open or row.wish == Wish.STOP:
        return False
    step = await runs.published_step(connection, run_id)
    known = await evaluations.begun_evaluations(connection, run_id)
    asked = await evaluations.asked_evaluations(connection, run_id)
    due = {one.label for one in evaluations_of_step(read_stored_config(row.config), step, known, asked)}
    open_ones = [one.label for one in asked] + [one.label for one in known if not one.has_ended]
    return not due.isdisjoint(open_ones)


async def _create_groups(
    connection: AsyncConnection, run_id: str, config: RunConfig, published: int, count: int
) -> None:
    training = config.training
    first = await runs.take_group_numbers(connection, run_id, count)
    left_out = {task.task_id for task in await quarantined_tasks(connection, run_id, training.groups_per_step)}
    chosen = await next_tasks(connection, run_id, config, published, first, count, left_out)
    if not chosen:
        which = " of the datasets with a weight above 0" if _is_mixed(config) else ""
        await open_runs.pause_run(
            connection, run_id, f"every task{which} is in quarantine; see `ratchet status {run_id}`"
        )
    new = [
        NewGroup(
            run_id=run_id,
            group_no=first + n,
            task_id=task.task_id,
            purpose=Purpose.TRAIN,
            size=training.group_size,
            min_graded=training.min_graded or max(2, training.group_size // 2),
            temperature=config.sampling.temperature,
            started_step=published,
            workflow_id=f"group/{run_id}/{first + n}",
        )
        for n, task in enumerate(chosen)
    ]
    await groups.create_groups(connection, await with_forks(connection, new, config, left_out), config.harness.name)


async def next_tasks(
    connection: AsyncConnection,
    run_id: str,
    config: RunConfig,
    published: int,
    first: int,
    count: int,
    left_out: Collection[int],
) -> list[LabelledTask]:
    """Return the tasks of the next `count` groups, of which `first` is the lowest number.

    All tasks in turn, or those whose recent mean reward lies within `training.solve_rates`, or by the weights of the
    datasets; in each case without those `left_out`. Empty if all are.
    """
    training = config.training
    weights = {number: 1.0 if one.weight is None else one.weight for number, one in enumerate(config.datasets)}
    is_mixed = _is_mixed(config)
    if training.solve_rates is None and not is_mixed:
        positions = await runs.positions_in_turn(connection, run_id, Purpose.TRAIN, first, count, left_out)
        return await runs.run_tasks_at(connection, run_id, Purpose.TRAIN, positions)
    rows = await tasks.recent_solve_rates(connection, run_id, published - training.solve_rate_steps + 1)
    rates = [row for row in rows if row.task_id not in left_out]
    if is_mixed:
        newest = await tasks.datasets_of_newest_groups(connection, run_id, _MIX_STEPS * training.groups_per_step)
        chosen = mix_datasets(rates, training.solve_rates, count, weights, newest)
    else:
        chosen = choose_tasks(rates, training.solve_rates, count)
    return [LabelledTask(one.task_id, one.label) for one in chosen]


def _is_mixed(config: RunConfig) -> bool:
    """Return whether the training datasets are mixed by weight; a weight of a held-out dataset has no effect."""
    return any(one.use == "train" and one.weight is not None for one in config.datasets)


def _config_of(input: PrepareRunInput) -> RunConfig:
    if input.input.config_path is not None:
        return load_config(Path(input.input.config_path))
    assert input.input.config is not None
    return resolve_config(input.input.config, "TrainRun config", Path.cwd())
