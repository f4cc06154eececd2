"""The activities of the Regrade workflow: list stored patches, and settle the new verdicts on each.

A faulty grader costs grades, but no model calls. The workflow boots and grades with the stages of a rollout.
"""

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.outcomes import build_rollout_chains, compute_outcome
from activities.run_configs import RecordActivities
from activities.stage import activity_stage
from grading.registry import GRADERS
from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.grading_payloads import RegradedInput, RegradedResult, RegradeInput, RegradePage
from ratchet.types import REWARDED_OUTCOMES
from store import chains, grades, groups, retention, rollouts
from store.rollouts import RolloutFacts
from store.schema import GradeTable

_PAGE = 200


def decisive_grade(verdicts: list[GradeTable]) -> GradeTable:
    """Return the verdict that decides: a rejection, else the first of the majority; a draw is not solved."""
    rejected = [grade for grade in verdicts if grade.rejected]
    solved = [grade for grade in verdicts if grade.solved]
    others = [grade for grade in verdicts if not grade.solved]
    return (rejected or (solved if len(solved) > len(others) else others))[0]


class RegradeActivities(RecordActivities):
    @activity_stage("regrade_page")
    async def regrade_page(self, input: RegradeInput) -> RegradePage:
        """Return the next patches, in order of their rollouts. Raises ConfigError if there is nothing to grade."""
        if input.grader is not None and input.grader not in GRADERS:
            raise ConfigError(f"no grader {input.grader!r}; there are {', '.join(sorted(GRADERS))}")
        remaining = await self.database.run(
            grades.patches_to_regrade, input.run_id, input.rollout_id, input.after, _PAGE, input.group
        )
        if not remaining and input.after == 0:
            raise ConfigError(
                f"{input.run_id or input.group or input.rollout_id}: no ended rollout with a stored patch; "
                "`ratchet show rollouts` lists them"
            )
        if not remaining:
            return RegradePage(patches=[], stages={}, grade_tries=self.settings.rollout.grade_tries)
        config = await self.configs.of_rollout(remaining[0].rollout_id)
        return RegradePage(
            patches=remaining,
            stages=self.settings.all_stages(config.limits.workspace_seconds, config.limits.eval_seconds),
            grade_tries=self.settings.rollout.grade_tries,
        )

    @activity_stage("settle_regrade")
    async def settle_regrade(self, input: RegradedInput) -> RegradedResult:
        """Count the new verdicts; with `adopt`, let them decide the reward."""
        config = await self.configs.of_rollout(input.rollout_id)
        async with self.database.begin() as connection:
            facts = await rollouts.lock_rollout(connection, input.rollout_id)
            given = [
                await grades.get_grade(connection, grade_id, input.rollout_id, input.patch_id)
                for grade_id in input.grade_ids
            ]
            if not given:
                return RegradedResult(rollout_id=input.rollout_id, graded=0, solved=0, changed=False, adopted=False)
            decisive = decisive_grade(given)
            before = await grades.get_grade(connection, facts.grade_id, input.rollout_id) if facts.grade_id else None
            now = (decisive.solved, decisive.rejected)
            changed = before is None or (before.solved, before.rejected) != now
            adopted = input.adopt and await _adopt(connection, input, decisive, config, facts)
        num_solved = sum(grade.solved and not grade.rejected for grade in given)
        return RegradedResult(
            rollout_id=input.rollout_id, graded=len(given), solved=num_solved, changed=changed, adopted=adopted
        )


async def _adopt(
    connection: AsyncConnection, input: RegradedInput, grade: GradeTable, config: RunConfig, facts: RolloutFacts
) -> bool:
    """Store outcome and reward by this grade; return False if the rollout or its group cannot change any more.

    A rollout that ended without a verdict may have stored no chains, so they are built from the turns that made the
    patch. One with a verdict keeps its chains, because a step that is replayed trains them. A run whose turns are
    archived is no longer changed. The group's lock orders this with planning.
    """
    if await retention.is_pruned(connection, facts.run_id):
        return False
    if facts.group_id is not None:
        await groups.lock_group(connection, facts.group_id)
    patch = await rollouts.get_patch(connection, input.patch_id, input.rollout_id)
    built = await build_rollout_chains(connection, input.rollout_id, patch.attempt, config)
    agent_exit = await rollouts.agent_exit_of(connection, input.rollout_id, patch.attempt)
    values = compute_outcome(config.grading.reward, grade, patch, agent_exit, built)
    is_first = facts.outcome not in REWARDED_OUTCOMES
    if is_first:
        values |= built.counts()
        values |= {"agent_exit": agent_exit} if agent_exit else {}
    if not await rollouts.update_reward(connection, input.rollout_id, values):
        return False
    if is_first:
        await chains.replace_chains(connection, input.rollout_id, built.chains)
    if facts.group_id is not None:
        await groups.settle_group_again(connection, facts.group_id)
    return True
