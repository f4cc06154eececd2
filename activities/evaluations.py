"""The activities of the Evaluate workflow: make the rollouts of an evaluation once, and compute its solve rate."""

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.run_configs import RecordActivities
from activities.stage import activity_stage
from ratchet.config import RunConfig
from ratchet.evaluation_payloads import EvaluateInput, EvaluateMembers, EvaluateResult
from ratchet.payloads import EvaluationPlan
from ratchet.types import Purpose
from store import evaluations, groups, runs
from store.evaluations import NewEvaluation
from store.groups import NewGroup

MEMBERS_PER_EXECUTION = 1000
"""The number of an evaluation's rollouts returned at once: 50,000 in one result exceed the 2 MB of a payload."""


class EvaluationActivities(RecordActivities):
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
            num_open = await runs.count_open_members(connection, input.run_id)
        limits = config.sandbox
        return EvaluateMembers(
            members=members[:MEMBERS_PER_EXECUTION],
            more=len(members) > MEMBERS_PER_EXECUTION,
            harness=config.harness.name,
            # Those of a step beside it wait for boxes in the same line: the fewer are in it, the sooner it is trained.
            window=max(1, round(input.share * max(limits.max_boxes, limits.max_open_rollouts - num_open))),
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
