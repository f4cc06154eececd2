"""The stages of regrading: stored patches are judged again, and a run may be paid by the new verdict.

Why here: a grader that was wrong costs grades, never model calls.
Called by: the `Regrade` workflow, which boots and grades with the stages of a rollout.
"""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.graders.registry import GRADERS
from activities.outcomes import chains_of, compute_outcome
from activities.run_configs import RunConfigs
from activities.stage import activity_stage
from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.grading_payloads import RegradedInput, RegradedResult, RegradeInput, RegradePage
from ratchet.store import chains, grades, groups, rollouts
from ratchet.store.database import Database
from ratchet.store.schema import GradeTable
from ratchet.temporal_settings import TemporalSettings

_PAGE = 200


@dataclass(slots=True, frozen=True)
class RewardSpread:
    """Verdicts of one patch: what most of them say, and whether they agree."""

    decisive: GradeTable
    solved: int
    graded: int


def reward_spread(verdicts: list[GradeTable]) -> RewardSpread:
    """The decisive one is the first of the majority; a draw counts as not solved, a rejection as more than either."""
    rejected = [grade for grade in verdicts if grade.rejected]
    solved = [grade for grade in verdicts if grade.solved and not grade.rejected]
    others = [grade for grade in verdicts if not grade.solved and not grade.rejected]
    decisive = rejected or (solved if len(solved) > len(others) else others)
    return RewardSpread(decisive[0], len(solved), len(verdicts))


class RegradeActivities:
    def __init__(self, database: Database, settings: TemporalSettings, configs: RunConfigs) -> None:
        self.database, self.settings, self.configs = database, settings, configs

    @activity_stage("regrade_page")
    async def regrade_page(self, input: RegradeInput) -> RegradePage:
        """The next patches in order of their rollouts' ids. Raises ConfigError where there is nothing at all to grade."""
        if input.grader is not None and input.grader not in GRADERS:
            raise ConfigError(f"no grader {input.grader!r}; there are {', '.join(sorted(GRADERS))}")
        async with self.database.begin() as connection:
            found = [
                row
                for row in await grades.patches_to_regrade(connection, input.run_id, input.rollout_id)
                if row[0] > input.after
            ]
        if not found and input.after == 0:
            raise ConfigError(
                f"{input.run_id or input.rollout_id}: no ended rollout with a stored patch; `ratchet rollouts` lists them"
            )
        if not found:
            return RegradePage(patches=[], stages={}, grade_tries=self.settings.rollout.grade_tries)
        config = await self.configs.of_rollout(found[0][0])
        return RegradePage(
            patches=found[:_PAGE],
            stages=self.settings.all_stages(config.limits.workspace_seconds, config.limits.eval_seconds),
            grade_tries=self.settings.rollout.grade_tries,
        )

    @activity_stage("settle_regrade")
    async def settle_regrade(self, input: RegradedInput) -> RegradedResult:
        """The spread of the new verdicts; with `adopt` the rollout is paid by it, unless a step has used its group."""
        config = await self.configs.of_rollout(input.rollout_id)
        async with self.database.begin() as connection:
            facts = await rollouts.lock_rollout(connection, input.rollout_id)
            given = [await grades.get_grade(connection, grade_id) for grade_id in input.grade_ids]
            if not given:
                return RegradedResult(rollout_id=input.rollout_id, graded=0, solved=0, changed=False, adopted=False)
            found = reward_spread(given)
            old = await rollouts.rewarding_grade(connection, input.rollout_id)
            before = await grades.get_grade(connection, old) if old is not None else None
            now = (found.decisive.solved, found.decisive.rejected)
            changed = before is None or (before.solved, before.rejected) != now
            adopted = input.adopt and await self._adopt(connection, input, found.decisive, config, facts.group_id)
        return RegradedResult(
            rollout_id=input.rollout_id, graded=found.graded, solved=found.solved, changed=changed, adopted=adopted
        )

    async def _adopt(
        self,
        connection: AsyncConnection,
        input: RegradedInput,
        grade: GradeTable,
        config: RunConfig,
        group_id: int | None,
    ) -> bool:
        """The chains are those of the turns that made the patch: whoever ended the rollout without a verdict may have stored none."""
        patch = await rollouts.get_patch(connection, input.patch_id)
        built, counts = await chains_of(connection, input.rollout_id, patch.attempt, config)
        exited = await rollouts.agent_exit_of(connection, input.rollout_id, patch.attempt)
        paid = compute_outcome(config.grading.reward, grade, patch, exited, counts)
        if not await rollouts.update_reward(
            connection, input.rollout_id, counts | paid | ({"agent_exit": exited} if exited else {})
        ):
            return False
        await chains.replace_chains(connection, input.rollout_id, built)
        if group_id is not None:
            await groups.settle_group_again(connection, group_id)
        return True
