"""The activities of the RolloutGroup workflow: list, replace and settle the members of a group."""

from activities.run_configs import RecordActivities
from activities.stage import activity_stage
from ratchet.payloads import GroupInput, GroupPlan, GroupResult, MemberInput, Replacement
from store import groups, rollouts, runs


class GroupRecordActivities(RecordActivities):
    """Book-keeping of a group; every method is one transaction."""

    @activity_stage("plan_group")
    async def plan_group(self, input: GroupInput) -> GroupPlan:
        """Return the members that still have to run."""
        async with self.database.begin() as connection:
            group = await groups.get_group(connection, input.group_id)
            members = await groups.open_group_members(connection, input.group_id)
        config = await self.configs.of_run(group.run_id)
        limits = config.limits
        return GroupPlan(
            group_id=input.group_id,
            run_id=group.run_id,
            task=group.task_label,
            harness=config.harness.name,
            step=group.started_step,
            members=members,
            stages=self.settings.all_stages(limits.workspace_seconds, limits.eval_seconds),
            summary=f"{group.size} × {group.task_label}",
        )

    @activity_stage("replace_member")
    async def replace_member(self, input: MemberInput) -> Replacement:
        """Replace a member that ended without a verdict, up to the run's `max_replacements`."""
        async with self.database.begin() as connection:
            if input.elsewhere and await rollouts.is_rollout_open(connection, input.rollout_id):
                return Replacement(running=True)
            run = await runs.the_run(connection, await rollouts.run_of_rollout(connection, input.rollout_id))
            bound = run.resolved_config.training.max_replacements
            new = await groups.replace_member(connection, input.rollout_id, bound)
        return Replacement(member=new)

    @activity_stage("settle_group")
    async def settle_group(self, input: GroupInput) -> GroupResult:
        """Make a group whose members have all ended, and of which none will be replaced, ready or failed."""
        async with self.database.begin() as connection:
            state = await groups.settle_group(connection, input.group_id, accept_failed=True)
            num_graded = await groups.count_rewarded_members(connection, input.group_id)
        return GroupResult(group_id=input.group_id, state=state, num_graded=num_graded)

    @activity_stage("cancel_group")
    async def cancel_group(self, input: GroupInput) -> GroupResult:
        """Cancel the group and its unclaimed members."""
        async with self.database.begin() as connection:
            await groups.cancel_group(connection, input.group_id)
            group = await groups.get_group(connection, input.group_id)
        return GroupResult(group_id=input.group_id, state=group.state, num_graded=0)
