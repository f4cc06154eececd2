"""Stages `claim` and `finalise`, and the group's book-keeping: the transactions that make a rollout count exactly once.

Why here: these are the only places where a rollout gets an owner or an outcome.
Called by: the `Rollout`, `RolloutGroup` and `Evaluate` workflows.
"""

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.outcomes import chains_of, compute_outcome
from activities.run_configs import RunConfigs
from activities.stage import activity_stage
from ratchet.config import RunConfig
from ratchet.errors import BugError, ConfigError
from ratchet.payloads import (
    Claim,
    FinaliseInput,
    GroupInput,
    GroupPlan,
    GroupResult,
    MemberInput,
    Replacement,
    RolloutInput,
    RolloutResult,
)
from ratchet.store import chains, grades, groups, rollouts, tasks
from ratchet.store.database import Database
from ratchet.store.schema import GradeTable, PatchTable
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import AgentExit, Outcome


class RecordActivities:
    def __init__(self, database: Database, settings: TemporalSettings, configs: RunConfigs) -> None:
        self.database, self.settings, self.configs = database, settings, configs

    @activity_stage("claim")
    async def claim(self, input: RolloutInput) -> Claim:
        """Takes the rollout for this workflow run and returns its limits; a rollout that has ended is returned as it is."""
        info = activity.info()
        assert info.workflow_run_id is not None
        if input.rollout_id is None:
            raise BugError("a rollout without a row is made by `prepare_rollout` first")
        config = await self.configs.of_rollout(input.rollout_id)
        async with self.database.begin() as connection:
            claimed = await rollouts.claim_rollout(connection, input.rollout_id, info.workflow_run_id)
            task = await tasks.task_of_rollout(connection, input.rollout_id)
        limits, numbers = config.limits, self.settings.rollout
        return Claim(
            rollout_id=input.rollout_id,
            run_id=claimed.run_id,
            group_id=claimed.group_id,
            task_id=claimed.task_id,
            outcome=Outcome(claimed.outcome) if claimed.outcome else None,
            reward=claimed.reward,
            attempt=claimed.attempt,
            patch_id=claimed.patch_id,
            agent_budget_seconds=limits.agent_seconds,
            eval_budget_seconds=limits.eval_seconds,
            guard_seconds=self.configs.guard_seconds(config),
            box_tries=numbers.box_tries,
            grade_tries=numbers.grade_tries,
            stages=self.settings.all_stages(limits.workspace_seconds, limits.eval_seconds),
            summary=f"{config.harness.name} on {task.label}",
        )

    @activity_stage("finalise")
    async def finalise(self, input: FinaliseInput) -> RolloutResult:
        """One transaction: sessions closed, chains rebuilt from the attempt that was graded, else the last, the outcome set, the group's rule applied."""
        config = await self.configs.of_rollout(input.rollout_id)
        async with self.database.begin() as connection:
            facts = await rollouts.lock_rollout(connection, input.rollout_id)
            ended = rollouts.ended_result(facts)
            if ended is not None:
                outcome, value, agent_exit = ended
                return RolloutResult(rollout_id=input.rollout_id, outcome=outcome, reward=value, agent_exit=agent_exit)
            await rollouts.close_sessions(connection, input.rollout_id)
            graded = await self._graded(connection, input)
            # A workflow that was started anew goes on from the stored patch: its turns are those of the attempt that made it.
            attempt = graded[1].attempt if graded else facts.attempt
            built, counts = await chains_of(connection, input.rollout_id, attempt, config)
            await chains.replace_chains(connection, input.rollout_id, built)
            exited = await rollouts.agent_exit_of(connection, input.rollout_id, attempt)
            timings = {name: round(used, 3) for name, used in input.used_seconds.items()}
            values = (
                counts | {"agent_exit": exited, "timings": timings} | _outcome(input, config, graded, exited, counts)
            )
            await rollouts.set_outcome(connection, input.rollout_id, values)
        return RolloutResult(
            rollout_id=input.rollout_id,
            outcome=Outcome(values["outcome"]),
            reward=values.get("reward"),
            agent_exit=AgentExit(exited) if exited else None,
        )

    async def _graded(self, connection: AsyncConnection, input: FinaliseInput) -> tuple[GradeTable, PatchTable] | None:
        if input.grade_id is None:
            return None
        grade = await grades.get_grade(connection, input.grade_id)
        return grade, await rollouts.get_patch(connection, grade.patch_id)

    @activity_stage("plan_group")
    async def plan_group(self, input: GroupInput) -> GroupPlan:
        """The members that still have to run, and the group's rule."""
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
        """A new member for one that ended without a verdict, as long as the run's `max_replacements` allows."""
        config = await self.configs.of_rollout(input.rollout_id)
        async with self.database.begin() as connection:
            if input.elsewhere and await rollouts.is_rollout_open(connection, input.rollout_id):
                return Replacement(running=True)
            new = await groups.replace_member(connection, input.rollout_id, config.training.max_replacements)
        return Replacement(member=new)

    @activity_stage("settle_group")
    async def settle_group(self, input: GroupInput) -> GroupResult:
        """All members have ended and none will be replaced: the group is ready or failed."""
        async with self.database.begin() as connection:
            state = await groups.settle_group(connection, input.group_id, accept_failed=True)
            num_graded = await groups.count_rewarded_members(connection, input.group_id)
        return GroupResult(group_id=input.group_id, state=state, num_graded=num_graded)

    @activity_stage("cancel_group")
    async def cancel_group(self, input: GroupInput) -> GroupResult:
        """The group was cancelled: it will never be trained on."""
        async with self.database.begin() as connection:
            await groups.cancel_group(connection, input.group_id)
            group = await groups.get_group(connection, input.group_id)
        return GroupResult(group_id=input.group_id, state=group.state, num_graded=0)


def _outcome(
    input: FinaliseInput,
    config: RunConfig,
    graded: tuple[GradeTable, PatchTable] | None,
    agent_exit: str | None,
    counts: dict[str, int],
) -> dict[str, Any]:
    """A reward exists only where a verdict was given."""
    if graded is None:
        assert input.failure is not None, "no verdict and no failure"
        return {"outcome": Outcome(input.failure), "outcome_reason": input.reason}
    try:
        return compute_outcome(config.grading.reward, *graded, agent_exit, counts)
    except ConfigError as error:  # the grade stays: `ratchet regrade --adopt` pays once the function is mended
        return {"outcome": Outcome.GRADER_FAILED, "outcome_reason": str(error)}
