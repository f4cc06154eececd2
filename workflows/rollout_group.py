"""`RolloutGroup`: the rollouts of one task whose rewards are compared; failed members are replaced until the group is settled.

Why here: a group is ready when its rule holds, and only its own workflow may decide that no member will be replaced any more.
Called by: `TrainRun`, once per group, abandoned: it outlives its parent's continue-as-new.
"""

import asyncio
from datetime import timedelta

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, WorkflowAlreadyStartedError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.rollout_records import RecordActivities
    from ratchet.payloads import (
        GroupInput,
        GroupPlan,
        GroupResult,
        MemberInput,
        RolloutInput,
        RolloutResult,
        StageOptions,
    )
    from ratchet.types import REWARDED_OUTCOMES, GroupState
    from workflows.options import FIRST_STAGE, child_options, run_activity, search_attributes, shielded
    from workflows.rollout import Rollout


LOOK_AGAIN = timedelta(seconds=15)


async def run_member(
    rollout_id: int, workflow_id: str, run_id: str, task: str, harness: str, step: int
) -> RolloutResult | None:
    """One member as a child; None where it ended without a result (failed, terminated, or cancelled by hand)."""
    arguments = child_options(workflow_id, search_attributes(run_id, task, harness, step), f"{harness} on {task}")
    try:
        return await workflow.execute_child_workflow(Rollout.run, RolloutInput(rollout_id=rollout_id), **arguments)
    except ChildWorkflowError as error:
        if workflow.cancellation_reason() is not None:  # however the child ended
            raise asyncio.CancelledError from error
        return None


async def run_with_replacements(
    rollout_id: int, workflow_id: str, run_id: str, task: str, harness: str, step: int, record: StageOptions
) -> None:
    """Runs a member, and its replacements as long as the store grants some."""
    member: tuple[int, str] | None = (rollout_id, workflow_id)
    while member is not None:
        elsewhere = False
        try:
            result = await run_member(*member, run_id, task, harness, step)
            if result is not None and result.outcome in REWARDED_OUTCOMES:
                return
        except WorkflowAlreadyStartedError:  # started by a group or an evaluation that was terminated
            elsewhere = True
        ended = MemberInput(rollout_id=member[0], elsewhere=elsewhere)
        replacement = await run_activity(RecordActivities.replace_member, ended, record)
        if replacement.running:
            await workflow.sleep(LOOK_AGAIN)
        else:
            member = replacement.member


@workflow.defn(name="RolloutGroup", failure_exception_types=[ValidationError])
class RolloutGroup:
    @workflow.run
    async def run(self, input: GroupInput) -> GroupResult:
        plan: GroupPlan | None = None
        try:
            while True:
                plan = await self._plan(input)
                result = await self._members(plan)
                if result.state is not GroupState.OPEN:
                    break
                # A member's workflow ended without an outcome, terminated in the UI for example: the sweep gives it one.
                await workflow.sleep(LOOK_AGAIN)
        except BaseException as error:
            if not is_cancelled_exception(error):
                raise
            options = plan.stages["record"] if plan else FIRST_STAGE
            await shielded(run_activity(RecordActivities.cancel_group, input, options, keep=True))
            raise
        await self._wake(plan.run_id)
        return result

    async def _plan(self, input: GroupInput) -> GroupPlan:
        plan = await run_activity(RecordActivities.plan_group, input, FIRST_STAGE)
        workflow.set_current_details(plan.summary)
        return plan

    async def _members(self, plan: GroupPlan) -> GroupResult:
        await asyncio.gather(*(self._member(plan, *member) for member in plan.members))
        settled = GroupInput(group_id=plan.group_id)
        return await run_activity(RecordActivities.settle_group, settled, plan.stages["record"], keep=True)

    async def _member(self, plan: GroupPlan, rollout_id: int, workflow_id: str) -> None:
        record = plan.stages["record"]
        await run_with_replacements(rollout_id, workflow_id, plan.run_id, plan.task, plan.harness, plan.step, record)

    async def _wake(self, run_id: str) -> None:
        """The signal only wakes TrainRun, which reads Postgres; a run that has ended needs no waking."""
        try:
            await workflow.get_external_workflow_handle(f"run/{run_id}").signal("wake")
        except Exception:
            workflow.logger.info("run is not there to be woken")
