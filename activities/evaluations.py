"""The activities of the Evaluate workflow: make the rollouts of an evaluation once, and compute its solve rate."""

from collections.abc import Mapping
from types import MappingProxyType

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.run_configs import RunConfigs
from activities.stage import activity_stage
from ratchet.config import RunConfig
from ratchet.payloads import EvaluateInput, EvaluateMembers, EvaluateResult, EvaluationPlan
from ratchet.store import evaluations, groups, runs
from ratchet.store.database import Database
from ratchet.store.evaluations import NewEvaluation
from ratchet.store.groups import NewGroup
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import Purpose


class EvaluationActivities:
    """Begin and end one evaluation."""

    def __init__(self, database: Database, settings: TemporalSettings, configs: RunConfigs) -> None:
        self.database = database
        self.settings = settings
        self.configs = configs

    @activity_stage("begin_evaluation")
    async def begin_evaluation(self, input: EvaluateInput) -> EvaluateMembers:
        """Make a group per held-out task at the first call, and return the members that have no reward yet."""
        config = await self.configs.of_run(input.run_id)
        plan = input.evaluation
        async with self.database.begin() as connection:
            version = await runs.newest_version(connection, input.run_id, plan.step)
            assert version is not None, "an evaluation starts after its version is published"
            new = NewEvaluation(input.run_id, **plan.model_dump(), policy_version=version.version)
            if await evaluations.begin_evaluation(connection, new):
                await _make_groups(connection, input.run_id, plan, config)
            members = await evaluations.open_evaluation_members(connection, input.run_id, plan.label)
        return EvaluateMembers(
            members=members,
            harness=config.harness.name,
            window=config.sandbox.max_boxes,
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
        )
        for n, task in enumerate(chosen)
    ]
    await groups.create_groups(connection, new, config.harness.name)


def planned_evaluations(config: RunConfig, known: Mapping[str, int] = MappingProxyType({})) -> list[EvaluationPlan]:
    """Return the evaluations of a run: of step 0 and of the last step, never of the best one.

    `known`: the step of each evaluation that has begun. Its label stays with that step, if steps were added since.
    """
    if not any(dataset.use == "eval" for dataset in config.datasets):
        return []
    steps = {"start": 0, "end": config.training.steps}
    both = {
        temperature: config.evaluation.samples if temperature > 0 else 1
        for temperature in config.evaluation.temperatures
    }
    only_at_start = dict.fromkeys(config.evaluation.start_temperatures, 1)
    num_samples = {"start": both | only_at_start | both, "end": both}  # a temperature in both lists takes `samples`
    planned = []
    for when in config.evaluation.at:
        for temperature, number in num_samples[when].items():
            label = f"{when}-{'greedy' if temperature == 0 else f't{temperature:g}'}"
            if known.get(label, steps[when]) != steps[when]:
                label += f"-{steps[when]}"
            planned.append(EvaluationPlan(label=label, step=steps[when], temperature=temperature, num_samples=number))
    return planned
