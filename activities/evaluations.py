"""The activities of the Evaluate workflow: make the rollouts of an evaluation once, and compute its solve rate."""

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.run_configs import RunConfigs
from activities.stage import activity_stage
from ratchet.config import RunConfig
from ratchet.evaluation_payloads import EvaluateInput, EvaluateMembers, EvaluateResult
from ratchet.payloads import EvaluationPlan
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import Purpose
from store import evaluations, groups, runs
from store.database import Database
from store.evaluations import AskedEvaluation, BegunEvaluation, NewEvaluation, temperature_label
from store.groups import NewGroup

MEMBERS_PER_EXECUTION = 1000
"""The number of an evaluation's rollouts returned at once: 50,000 in one result exceed the 2 MB of a payload."""


class EvaluationActivities:
    def __init__(self, database: Database, settings: TemporalSettings, configs: RunConfigs) -> None:
        self.database = database
        self.settings = settings
        self.configs = configs

    @activity_stage("begin_evaluation")
    async def begin_evaluation(self, input: EvaluateInput) -> EvaluateMembers:
        """Make a group per held-out task at the first call, and return members that have no reward yet."""
        config = await self.configs.of_run(input.run_id)
        plan = input.evaluation
        async with self.database.begin() as connection:
            version = await runs.newest_version(connection, input.run_id, plan.step)
            assert version is not None, "an evaluation starts after its version is published"
            new = NewEvaluation(input.run_id, **plan.model_dump(), policy_version=version.version)
            if await evaluations.begin_evaluation(connection, new):
                await _make_groups(connection, input.run_id, plan, config)
            members = await evaluations.open_evaluation_members(
                connection, input.run_id, plan.label, input.after, limit=MEMBERS_PER_EXECUTION + 1
            )
        return EvaluateMembers(
            members=members[:MEMBERS_PER_EXECUTION],
            more=len(members) > MEMBERS_PER_EXECUTION,
            harness=config.harness.name,
            window=max(1, round(input.share * config.sandbox.max_open_rollouts)),
            stages=self.settings.all_stages(config.limits.workspace_seconds, config.limits.eval_seconds),
        )

    @activity_stage("end_evaluation")
    async def end_evaluation(self, input: EvaluateInput) -> EvaluateResult:
        """Mark the evaluation as ended and return its solve rate."""
        label = input.evaluation.label
        async with self.database.begin() as connection:
            await evaluations.end_evaluation(connection, input.run_id, label)
            rate = await evaluations.evaluation_solve_rate(connection, input.run_id, label)
        return EvaluateResult(
            label=label, num_rollouts=rate.num_rollouts, num_graded=rate.num_graded, solve_rate=rate.mean_reward
        )


async def _make_groups(connection: AsyncConnection, run_id: str, plan: EvaluationPlan, config: RunConfig) -> None:
    num_tasks = await runs.count_run_tasks(connection, run_id, Purpose.EVAL)
    chosen = await runs.run_tasks_at(connection, run_id, Purpose.EVAL, list(range(num_tasks)))
    first = await runs.take_group_numbers(connection, run_id, num_tasks)
    new = [
        NewGroup(
            run_id=run_id,
            group_no=first + n,
            task_id=task.task_id,
            purpose=Purpose.EVAL,
            label=plan.label,
            size=plan.num_samples,
            min_graded=1,
            temperature=plan.temperature,
            started_step=plan.step,
            workflow_id=f"evaluate/{run_id}/{plan.label}/{n}",
            forked_turn_id=config.evaluation.forked_turn_id,
        )
        for n, task in enumerate(chosen)
    ]
    await groups.create_groups(connection, new, config.harness.name)


def planned_evaluations(config: RunConfig) -> list[EvaluationPlan]:
    """Return the evaluations of step 0 and of the last step that `evaluation.at` names."""
    if not _has_held_out_tasks(config):
        return []
    steps = {"start": 0, "end": config.training.steps}
    return [
        _plan(config, when, steps[when], temperature)
        for when in config.evaluation.at
        for temperature in _at(config, when)
    ]


def evaluations_of_step(
    config: RunConfig, step: int, begun: Sequence[BegunEvaluation], asked: Sequence[AskedEvaluation]
) -> list[EvaluationPlan]:
    """Return the evaluations of one step that have not ended: those that have begun, those of `evaluation.at`, those
    every so many steps, and what people asked.

    The config plans one evaluation per step and temperature, also if it has changed since: an evaluation of the end
    that was made before steps were added goes on if it has not ended, and is not repeated if it has. A label stays with
    its step, so another evaluation of the end gets the step's number. What people ask is evaluated at the next step.
    """
    if not _has_held_out_tasks(config):
        return []
    here = [one for one in begun if one.step == step]
    labels = {one.label for one in begun}
    begun_here = {one.temperature for one in here if not one.is_asked}
    planned = [one for one in planned_evaluations(config) if one.step == step]
    every = config.evaluation.every
    if every is not None and step and step % every == 0 and not any(one.label.startswith("end-") for one in planned):
        planned += [_plan(config, f"step{step}", step, temperature) for temperature in _at(config, "end")]
    return [
        *(_with_label(one, one.label, step) for one in here if not one.has_ended),
        *(
            _with_label(one, f"{one.label}-{step}" if one.label in labels else one.label, step)
            for one in planned
            if one.temperature not in begun_here
        ),
        *(_with_label(one, one.label, step) for one in asked if one.label not in labels),
    ]


def _with_label(one: BegunEvaluation | AskedEvaluation | EvaluationPlan, label: str, step: int) -> EvaluationPlan:
    return EvaluationPlan(label=label, step=step, temperature=one.temperature, num_samples=one.num_samples)


def _has_held_out_tasks(config: RunConfig) -> bool:
    return any(dataset.use == "eval" for dataset in config.datasets)


def _at(config: RunConfig, when: str) -> list[float]:
    """Return the temperatures at one time, each once."""
    evaluation = config.evaluation
    more = evaluation.start_temperatures if when == "start" else []
    return list(dict.fromkeys([*evaluation.temperatures, *more]))


def _plan(config: RunConfig, when: str, step: int, temperature: float) -> EvaluationPlan:
    """A temperature in both lists takes `samples`; greedy decoding takes one."""
    evaluation = config.evaluation
    return EvaluationPlan(
        label=f"{when}-{temperature_label(temperature)}",
        step=step,
        temperature=temperature,
        num_samples=evaluation.samples if temperature > 0 and temperature in evaluation.temperatures else 1,
    )
