"""The RolloutGroup workflow: run the rollouts of one task, replace failed members, settle the group.

Only this workflow decides that no member will be replaced any more. TrainRun starts it with the close policy `abandon`,
so that it outlives a continue-as-new of its parent.
"""

import asyncio
from datetime import timedelta

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import (
    ApplicationError,
    ChildWorkflowError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from activities.group_members import GroupRecordActivities
    from ratchet.payloads import (
        GroupInput,
        GroupMember,
        GroupPlan,
        GroupResult,
        MemberInput,
        RolloutInput,
        RolloutResult,
        StageOptions,
    )
    from ratchet.types import REWARDED_OUTCOMES, GroupState
    from workflows.activity_options import (
        FIRST_STAGE,
        child_options,
        run_activity,
        run_activity_even_if_cancelled,
        search_attributes,
        shielded,
    )
    from workflows.rollout import Rollout


CHECK_AGAIN_DELAY = timedelta(seconds=15)
MAX_CHECK_DELAY = timedelta(minutes=5)
"""Longest delay between two questions whether a member that runs elsewhere has ended; each adds to the history."""
MAX_ROUNDS = 20
"""A group whose members have ended so often without an outcome fails: five minutes, in which a sweep has given them
one unless something is broken."""


async def run_member(member: GroupMember, run_id: str, task: str, harness: str, step: int) -> RolloutResult | None:
    """Run one member as a child; return None if it ended without a result (failed, terminated or cancelled by hand)."""
    options = child_options(member.workflow_id, search_attributes(run_id, task, harness, step), f"{harness} on {task}")
    try:
        input = RolloutInput(rollout_id=member.rollout_id)
        return await workflow.execute_child_workflow(Rollout.run, input, **options)
    except ChildWorkflowError as error:
        if workflow.cancellation_reason() is not None:
            raise asyncio.CancelledError from error
        return None


async def run_with_replacements(
    first: GroupMember, run_id: str, task: str, harness: str, step: int, record: StageOptions
) -> None:
    """Run a member, and replacements as long as the store grants them."""
    member: GroupMember | None = first
    delay = CHECK_AGAIN_DELAY
    while member is not None:
        elsewhere = False
        try:
            result = await run_member(member, run_id, task, harness, step)
            if result is not None and result.outcome in REWARDED_OUTCOMES:
                return
        except WorkflowAlreadyStartedError:  # the child of a group or an evaluation that was terminated
            elsewhere = True
        ended = MemberInput(rollout_id=member.rollout_id, elsewhere=elsewhere)
        replacement = await run_activity(GroupRecordActivities.replace_member, ended, record)
        if replacement.running:
            await workflow.sleep(delay)
            delay = min(2 * delay, MAX_CHECK_DELAY)
        else:
            member = replacement.member
            delay = CHECK_AGAIN_DELAY


@workflow.defn(name="RolloutGroup", failure_exception_types=[ValidationError])
class RolloutGroup:
    @workflow.run
    async def run(self, input: GroupInput) -> GroupResult:
        plan: GroupPlan | None = None
        try:
            rounds = 0
            while True:
                plan = await run_activity(GroupRecordActivities.plan_group, input, FIRST_STAGE)
                workflow.set_current_details(plan.summary)
                result = await self._run_members(plan)
                if result.state is not GroupState.OPEN:
                    break
                rounds += 1
                if rounds >= MAX_ROUNDS:
                    raise ApplicationError(
                        f"members of the group have ended {rounds} times without an outcome", type="GroupStuck"
                    )
                # A member's workflow ended without an outcome, for example terminated in the UI; the sweep sets one.
                await workflow.sleep(CHECK_AGAIN_DELAY)
        except BaseException as error:
            if not is_cancelled_exception(error):
                raise
            options = plan.stages["record"] if plan else FIRST_STAGE
            await shielded(run_activity_even_if_cancelled(GroupRecordActivities.cancel_group, input, options))
            raise
        await self._wake(plan.run_id)
        return result

    async def _run_members(self, plan: GroupPlan) -> GroupResult:
        record = plan.stages["record"]
        shared = (plan.run_id, plan.task, plan.harness, plan.step, record)
        await asyncio.gather(*(run_with_replacements(member, *shared) for member in plan.members))
        settled = GroupInput(group_id=plan.group_id)
        return await run_activity_even_if_cancelled(GroupRecordActivities.settle_group, settled, record)

    async def _wake(self, run_id: str) -> None:
        """Wake TrainRun, which then reads Postgres. A lost signal costs only its polling interval."""
        try:
            await workflow.get_external_workflow_handle(f"run/{run_id}").signal("wake")
        except Exception:
            workflow.logger.info("run has no workflow to wake")
