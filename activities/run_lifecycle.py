"""The life of a run: prepared once, looked at on every wake, its groups and evaluations made, and ended.

Why here: TrainRun decides, these activities read and write; ids cross Temporal, data does not.
Called by: the `TrainRun` and `Evaluate` workflows, and `Rollout` when it was started from the stock CLI.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.dataset_import import import_dataset, usable
from activities.datasets.formats import dataset_digest
from activities.graders.rewards import find_reward
from activities.harnesses.registry import Harnesses
from activities.run_configs import RunConfigs
from activities.stage import activity_stage, heartbeating
from engine.policy_files import link_version
from ratchet import paths
from ratchet.config import TINY, RunConfig
from ratchet.config_sources import load_config, resolve_config
from ratchet.errors import ConfigError, DatasetError, LearnerLostError
from ratchet.model_directory import model_of, require_model
from ratchet.payloads import (
    EndRunInput,
    EvaluateInput,
    EvaluateMembers,
    EvaluateResult,
    EvaluationPlan,
    PrepareRunInput,
    RolloutInput,
    RolloutRow,
    RunPlan,
    RunView,
    StageResult,
    StartedGroup,
    StartedMember,
    ViewRunInput,
)
from ratchet.store import engines, evaluations, groups, plans, rollouts, runs, tasks, training_groups
from ratchet.store.database import Database
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import Purpose, RunState, Wish, policy_version
from training import group_selection
from training.task_selection import TaskRate, choose_tasks

_CHECKPOINT_SECONDS, _POLL_SECONDS = 20.0, 0.3


class RunActivities:
    def __init__(self, database: Database, settings: TemporalSettings, configs: RunConfigs) -> None:
        self.database, self.settings, self.configs = database, settings, configs

    # ------------------------------------------------------------ a run begins and ends

    @activity_stage("prepare_run")
    async def prepare_run(self, input: PrepareRunInput) -> RunPlan:
        """Validates everything, imports tasks, writes the run's row and its version 0; running it again changes nothing."""
        async with heartbeating():
            async with self.database.begin() as connection:
                row = await runs.get_run(connection, input.input.run_id or input.run_id)
            if row is None:
                if input.input.run_id is not None:
                    raise ConfigError(f"run {input.input.run_id} does not exist; `ratchet runs` lists those that do")
                config = _config_of(input)
                await self._create(input.run_id, config, _name_of(input))
            else:
                config = RunConfig.model_validate(row.config)
        numbers = self.settings.train_run
        return RunPlan(
            run_id=input.input.run_id or input.run_id,
            num_steps=config.training.steps,
            evaluations=planned_evaluations(config),
            stages=self.settings.all_stages(config.limits.workspace_seconds, config.limits.eval_seconds),
            poll_seconds=numbers.poll,
            steps_per_execution=numbers.steps_per_execution,
            summary=f"{config.training.steps} steps of {config.training.groups_per_step} groups × {config.training.group_size} rollouts",
        )

    async def _create(self, run_id: str, config: RunConfig, name: str) -> None:
        if config.sandbox.max_boxes > self.settings.queues["agent"].slots * self.settings.agent_workers:
            raise ConfigError(
                f"sandbox.max_boxes ({config.sandbox.max_boxes}) is above the agent slots in temporal.yaml; raise queues.agent.slots or agent_workers"
            )
        find_reward(config.grading.reward)  # a reward that cannot be found is told before anything starts
        Harnesses()[config.harness.name].check(config.harness.all_options())
        async with self.database.begin() as connection:
            if name != runs.ADHOC:
                await runs.require_no_other_run(connection, run_id)
            model = await model_directory(connection, config)
        first = paths.policies() / run_id / "0.e0"
        files = await asyncio.to_thread(link_version, model, first)
        async with self.database.begin() as connection:
            order = await _import_tasks(connection, config)
            values = {
                "run_id": run_id,
                "config": config.model_dump(mode="json"),
                "config_digest": config.digest(),
                "config_name": name,
                "seed": config.seed,
                "model_path": str(model),
                "init_from": config.init_from,
            }
            if name != runs.ADHOC:
                await runs.require_no_other_run(connection, run_id)
            await runs.create_run(connection, values)
            for purpose, task_ids in order.items():
                await runs.set_task_order(connection, run_id, purpose, task_ids)
            await runs.publish_initial(connection, policy_version(run_id, 0, 0), run_id, str(first), files)

    @activity_stage("end_run")
    async def end_run(self, input: EndRunInput) -> StageResult:
        """A run is done when its last checkpoint is committed: raises LearnerLostError, which is tried again, as long as it is not."""
        if input.state is RunState.DONE:
            await self._wait_for_checkpoint(input.run_id)
        async with self.database.begin() as connection:
            await runs.end_run(connection, input.run_id, input.state, input.reason)
            if input.state is not RunState.DONE:
                await groups.cancel_unstarted_groups(connection, input.run_id)
        return StageResult()

    async def _wait_for_checkpoint(self, run_id: str) -> None:
        num_steps = (await self.configs.of_run(run_id)).training.steps
        end = asyncio.get_running_loop().time() + _CHECKPOINT_SECONDS
        while True:
            async with self.database.begin() as connection:
                row = await runs.get_run(connection, run_id)
            assert row is not None
            if row.checkpoint_step >= num_steps or row.state == RunState.DONE:
                return
            if asyncio.get_running_loop().time() > end:
                raise LearnerLostError(
                    f"the checkpoint of step {num_steps} of {run_id} is not complete yet; see `ratchet logs learner`"
                )
            await asyncio.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------ a run goes on

    @activity_stage("view_run")
    async def view_run(self, input: ViewRunInput) -> RunView:
        """What Postgres says now; makes the rows of as many new groups as the staleness bound allows, unless the run is to pause."""
        config = await self.configs.of_run(input.run_id)
        async with self.database.begin() as connection:
            await group_selection.consume_without_signal(connection, input.run_id, config.training)
            await group_selection.pause_if_all_fail(connection, input.run_id, config.training)
            row = await runs.get_run(connection, input.run_id)
            assert row is not None
            if input.make_groups and row.state not in (RunState.RUNNING, RunState.PAUSED):
                raise ConfigError(
                    f"run {input.run_id} has ended ({row.state}): its workflow cannot go on; start a new run"
                )
            if input.make_groups and row.wish == Wish.NONE and row.state == RunState.RUNNING:
                await self._make_groups(connection, input.run_id, config)
            plannable = await group_selection.plannable(connection, input.run_id, config.training)
            open_groups = await runs.open_groups(connection, input.run_id)
            ended = await evaluations.ended_evaluations(connection, input.run_id)
            step = await runs.published_step(connection, input.run_id)
        started = [
            StartedGroup(
                group_id=group_id, workflow_id=workflow_id, task=label, harness=config.harness.name, step=started_step
            )
            for group_id, workflow_id, label, started_step in open_groups
        ]
        return RunView(
            step=step, open_groups=started, plannable=plannable, wish=Wish(row.wish), evaluations_ended=sorted(ended)
        )

    async def _make_groups(self, connection: AsyncConnection, run_id: str, config: RunConfig) -> None:
        """As many as the staleness bound and the steps ahead allow: `readiness.groups_to_start`."""
        training = config.training
        counts = await runs.count_groups(connection, run_id)
        planned = await plans.newest_planned_step(connection, run_id)
        published = await runs.published_step(connection, run_id)
        seen = await training_groups.count_consumed_groups(connection, run_id, planned + 1)
        missing = group_selection.groups_to_start(
            training, published, planned, counts.get("open", 0), counts.get("ready", 0), seen
        )
        if missing == 0:
            return
        first = await runs.take_group_numbers(connection, run_id, missing)
        chosen = await next_tasks(connection, run_id, config, published, first, missing)
        rows = [
            {
                "run_id": run_id,
                "group_no": first + n,
                "task_id": task_id,
                "purpose": Purpose.TRAIN,
                "size": training.group_size,
                "min_graded": training.min_graded or max(2, training.group_size // 2),
                "temperature": config.sampling.temperature,
                "started_step": published,
                "workflow_id": f"group/{run_id}/{first + n}",
            }
            for n, (task_id, _) in enumerate(chosen)
        ]
        await groups.create_groups(connection, rows, config.harness.name)

    # ------------------------------------------------------------ evaluations

    @activity_stage("begin_evaluation")
    async def begin_evaluation(self, input: EvaluateInput) -> EvaluateMembers:
        """Makes a group per held-out task and sample once; returns the members that still have to run."""
        config = await self.configs.of_run(input.run_id)
        plan = input.evaluation
        async with self.database.begin() as connection:
            version = await runs.newest_version(connection, input.run_id, plan.step)
            assert version is not None, "an evaluation starts after its version is published"
            values = {"run_id": input.run_id, **plan.model_dump(), "policy_version": version.version}
            if await evaluations.begin_evaluation(connection, values):
                await self._make_evaluation_groups(connection, input.run_id, plan, config)
            members = await evaluations.open_evaluation_members(connection, input.run_id, plan.label)
        return EvaluateMembers(
            members=[
                StartedMember(rollout_id=rollout, workflow_id=workflow, task=task)
                for rollout, workflow, task in members
            ],
            harness=config.harness.name,
            window=config.sandbox.max_boxes,
            stages=self.settings.all_stages(config.limits.workspace_seconds, config.limits.eval_seconds),
        )

    async def _make_evaluation_groups(
        self, connection: AsyncConnection, run_id: str, plan: EvaluationPlan, config: RunConfig
    ) -> None:
        num_tasks = await runs.count_run_tasks(connection, run_id, Purpose.EVAL)
        chosen = await runs.run_tasks_at(connection, run_id, Purpose.EVAL, list(range(num_tasks)))
        first = await runs.take_group_numbers(connection, run_id, num_tasks)
        rows = [
            {
                "run_id": run_id,
                "group_no": first + n,
                "task_id": task_id,
                "purpose": Purpose.EVAL,
                "label": plan.label,
                "size": plan.num_samples,
                "min_graded": 1,
                "temperature": plan.temperature,
                "started_step": plan.step,
                "workflow_id": f"evaluate/{run_id}/{plan.label}/{n}",
            }
            for n, (task_id, _) in enumerate(chosen)
        ]
        await groups.create_groups(connection, rows, config.harness.name)

    @activity_stage("end_evaluation")
    async def end_evaluation(self, input: EvaluateInput) -> EvaluateResult:
        async with self.database.begin() as connection:
            await evaluations.end_evaluation(connection, input.run_id, input.evaluation.label)
            total, graded, rate = await evaluations.evaluation_solve_rate(
                connection, input.run_id, input.evaluation.label
            )
        return EvaluateResult(label=input.evaluation.label, num_rollouts=total, num_graded=graded, solve_rate=rate)

    # ------------------------------------------------------------ a single rollout, started by hand

    @activity_stage("prepare_rollout")
    async def prepare_rollout(self, input: RolloutInput) -> RolloutRow:
        """The row of a rollout that was started from the stock CLI with a dataset and a task; belongs to run `adhoc`."""
        info = activity.info()
        assert input.dataset is not None and input.task is not None, "checked by RolloutInput"
        values: dict[str, Any] = {**(input.config or {}), "datasets": [{"path": input.dataset}]}
        values |= {"model": input.model} if input.model else {}
        values |= {"harness": {"name": input.harness}} if input.harness else {}
        values["grading"] = {**(values.get("grading") or {}), "admission": "ignored"}  # who names a task wants that one
        config = resolve_config(values, "Rollout input", Path.cwd())
        run_id = f"{runs.ADHOC}-{config.digest()[:8]}"
        async with self.database.begin() as connection:
            exists = await runs.get_run(connection, run_id)
            _check_served(input, config, await engines.list_engines(connection))
        if exists is None:
            await self._create(run_id, config, runs.ADHOC)
        digest = await asyncio.to_thread(dataset_digest, config.datasets[0])
        async with self.database.begin() as connection:
            if not (
                known := await tasks.tasks_of_dataset(connection, digest)
            ):  # the file has changed since the run was made
                await import_dataset(connection, config.datasets[0], digest)
                known = await tasks.tasks_of_dataset(connection, digest)
            task_id = _find_task(known, input)
            rollout_id = await rollouts.create_adhoc_rollout(
                connection,
                {
                    "run_id": run_id,
                    "task_id": task_id,
                    "member": 0,
                    "purpose": Purpose.EVAL,
                    "workflow_id": info.workflow_id,
                    "harness": config.harness.name,
                    "temperature": config.sampling.temperature,
                    "policy_version": input.policy_version,
                },
            )
        stages = self.settings.all_stages(config.limits.workspace_seconds, config.limits.eval_seconds)
        return RolloutRow(rollout_id=rollout_id, stages=stages)


async def next_tasks(
    connection: AsyncConnection, run_id: str, config: RunConfig, published: int, first: int, count: int
) -> list[tuple[int, str]]:
    """(task id, label): all in turn by group number, or those that `training.solve_rates` lets through."""
    bounds = config.training.solve_rates
    if bounds is None:
        num_tasks = await runs.count_run_tasks(connection, run_id, Purpose.TRAIN)
        return await runs.run_tasks_at(
            connection, run_id, Purpose.TRAIN, [(first + n) % num_tasks for n in range(count)]
        )
    rows = await tasks.recent_solve_rates(connection, run_id, published - config.training.solve_rate_steps + 1)
    rates = [TaskRate(*row) for row in rows]
    return [(one.task_id, one.label) for one in choose_tasks(rates, bounds, count)]


def _find_task(rows: list[tuple[int, str, int]], input: RolloutInput) -> int:
    for task_id, label, number in rows:
        if input.task in (label, number) or (
            isinstance(input.task, str) and input.task.isdigit() and int(input.task) == number
        ):
            return task_id
    raise DatasetError(
        f"{input.dataset}: no task {input.task!r}; give a row's label, or its number from 0 to {len(rows) - 1}"
    )


def _check_served(input: RolloutInput, config: RunConfig, found: list[engines.EngineRow]) -> None:
    """A single rollout is sampled by whatever the engines serve: who names a model or a version must not get another."""
    for wanted, served, what in (
        (
            input.model and str(model_of(config).resolve()),
            {str(Path(engine.model_path).resolve()) for engine in found},
            "model",
        ),
        (input.policy_version, {engine.version for engine in found}, "policy version"),
    ):
        if wanted and found and wanted not in served:
            names = ", ".join(sorted(str(name) for name in served))
            raise ConfigError(
                f"{what} {wanted} is not served; the engines serve {names} (`ratchet up CONFIG` starts them on a config's model)"
            )


def _config_of(input: PrepareRunInput) -> RunConfig:
    if input.input.config_path is not None:
        return load_config(Path(input.input.config_path))
    assert input.input.config is not None
    return resolve_config(input.input.config, "TrainRun config", Path.cwd())


def _name_of(input: PrepareRunInput) -> str:
    return Path(input.input.config_path).stem if input.input.config_path else input.run_id.rsplit("-", 2)[0]


def planned_evaluations(config: RunConfig) -> list[EvaluationPlan]:
    """Fixed before the run begins: version 0 and the last step, never the best."""
    steps = {"start": 0, "end": config.training.steps}
    compared = {
        temperature: config.evaluation.samples if temperature > 0 else 1
        for temperature in config.evaluation.temperatures
    }
    further = dict.fromkeys(config.evaluation.start_temperatures, 1)
    samples = {"start": compared | further | compared, "end": compared}  # one that is named twice is compared
    plans = []
    for when in config.evaluation.at if any(dataset.use == "eval" for dataset in config.datasets) else []:
        for temperature, num_samples in samples[when].items():
            label = f"{when}-{'greedy' if temperature == 0 else f't{temperature:g}'}"
            plans.append(
                EvaluationPlan(label=label, step=steps[when], temperature=temperature, num_samples=num_samples)
            )
    return plans


async def model_directory(connection: AsyncConnection, config: RunConfig) -> Path:
    """Where the run's initial weights are; raises ConfigError naming what is missing."""
    if config.init_from is not None and "@" in config.init_from and not Path(config.init_from).exists():
        run_id, _, step = config.init_from.rpartition("@")
        version = await runs.newest_version(connection, run_id, int(step)) if step.isdigit() else None
        if version is None:
            raise ConfigError(
                f"init_from: {config.init_from!r} names no published step; expected a directory or RUN@step"
            )
        return Path(version.uri)
    model = Path(config.init_from) if config.init_from else model_of(config)
    if config.model == TINY and config.init_from is None and not model.exists():
        raise ConfigError(f"model: {model} does not exist; make it with `ratchet tiny-policy`")
    require_model(model)
    return model


async def _import_tasks(connection: AsyncConnection, config: RunConfig) -> dict[Purpose, list[int]]:
    """Imports every dataset; the order of training tasks is the run's seed's, that of held-out tasks the file's."""
    order: dict[Purpose, list[int]] = {Purpose.TRAIN: [], Purpose.EVAL: []}
    for dataset in config.datasets:
        digest = await asyncio.to_thread(dataset_digest, dataset)
        await import_dataset(connection, dataset, digest)
        order[Purpose(dataset.use)] += await usable(connection, dataset, digest, config)
    random.Random(f"{config.seed}/task order").shuffle(order[Purpose.TRAIN])
    return order
