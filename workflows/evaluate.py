"""`Evaluate`: every held-out task under one policy version at one temperature.

Why here: a figure is only worth something if the version does not change under it, so TrainRun publishes nothing meanwhile.
Called by: `TrainRun` as a child.
"""

import asyncio

from pydantic import ValidationError
from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.run_lifecycle import RunActivities
    from ratchet.payloads import EvaluateInput, EvaluateMembers, EvaluateResult, StartedMember
    from workflows.options import FIRST_STAGE, run_activity
    from workflows.rollout_group import run_with_replacements


@workflow.defn(name="Evaluate", failure_exception_types=[ValidationError])
class Evaluate:
    @workflow.run
    async def run(self, input: EvaluateInput) -> EvaluateResult:
        plan = await run_activity(RunActivities.begin_evaluation, input, FIRST_STAGE)
        window = asyncio.Semaphore(plan.window)
        await asyncio.gather(*(self._member(input, plan, member, window) for member in plan.members))
        return await run_activity(RunActivities.end_evaluation, input, plan.stages["record"])

    async def _member(
        self, input: EvaluateInput, plan: EvaluateMembers, member: StartedMember, window: asyncio.Semaphore
    ) -> None:
        async with window:
            step = input.evaluation.step
            record = plan.stages["record"]
            await run_with_replacements(
                member.rollout_id, member.workflow_id, input.run_id, member.task, plan.harness, step, record
            )
