"""The Evaluate workflow: run every held-out task under one policy version at one temperature.

TrainRun waits for its end before it plans a step, so that the policy version does not change meanwhile.
"""

import asyncio

from pydantic import ValidationError
from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.evaluations import EvaluationActivities
    from ratchet.evaluation_payloads import EvaluateInput, EvaluateMembers, EvaluateResult, StartedMember
    from ratchet.payloads import GroupMember
    from workflows.activity_options import FIRST_STAGE, run_activity
    from workflows.rollout_group import run_with_replacements


@workflow.defn(name="Evaluate", failure_exception_types=[ValidationError])
class Evaluate:
    """Runs the members of one evaluation, at most `window` at a time.

    If its history becomes long, or there are more members than one execution gets, it waits for those in flight and
    continues as new after the last one that it has begun. So each member has one turn, and the evaluation ends also if
    members have ended without a verdict and get no replacement.
    """

    def __init__(self) -> None:
        self.after = 0
        self.num_left = 0
        self.num_ended = 0

    @workflow.run
    async def run(self, input: EvaluateInput) -> EvaluateResult:
        self.after = input.after
        plan = await run_activity(EvaluationActivities.begin_evaluation, input, FIRST_STAGE)
        window = asyncio.Semaphore(plan.window)
        await asyncio.gather(*(self._run_member(input, plan, member, window) for member in plan.members))
        if self.num_left or plan.more:
            workflow.continue_as_new(input.model_copy(update={"after": self.after}))
        return await run_activity(EvaluationActivities.end_evaluation, input, plan.stages["record"])

    async def _run_member(
        self, input: EvaluateInput, plan: EvaluateMembers, member: StartedMember, window: asyncio.Semaphore
    ) -> None:
        async with window:
            if workflow.info().is_continue_as_new_suggested():
                self.num_left += 1
                return
            self.after = member.rollout_id  # members begin in order, because the semaphore is fair
            step = input.evaluation.step
            record = plan.stages["record"]
            first = GroupMember(member.rollout_id, member.workflow_id)
            await run_with_replacements(first, input.run_id, member.task, plan.harness, step, record)
            self.num_ended += 1
            workflow.set_current_details(
                f"{input.evaluation.label} of step {step}: {self.num_ended} of {len(plan.members)} rollouts have ended "
                "in this execution"
            )
