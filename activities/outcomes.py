"""Turn a stored grade and stored turns into a rollout's chains, outcome and reward.

Rewards are functions of stored verdicts, so it can be computed again from the store (`ratchet regrade`).
"""

from dataclasses import replace
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncConnection

from adapter.turns.loss_mask import build_chains
from grading.base import Verdict
from grading.rewards import RewardFacts, compute_reward
from ratchet.config import RunConfig
from ratchet.types import Outcome
from store import turns
from store.chains import TokenChain, trained_leaves
from store.rollouts import OutcomeValues
from store.schema import GradeTable, PatchTable


class RolloutChains(NamedTuple):
    """The chains of an attempt, and the counts that the rollout's row keeps."""

    chains: list[TokenChain]
    num_turns: int
    num_trained_tokens: int

    def counts(self) -> OutcomeValues:
        """Return the columns of the rollout's row."""
        return {
            "num_turns": self.num_turns,
            "num_chains": sum(1 for chain in self.chains if chain.num_trained),
            "num_trained_tokens": self.num_trained_tokens,
        }


async def build_rollout_chains(
    connection: AsyncConnection, rollout_id: int, attempt: int, config: RunConfig, chosen_only: bool = True
) -> RolloutChains:
    """Build the chains of an attempt's completed turns; the caller stores them. An endpoint's need no logprobs.
    `chosen_only`: if the run has a generate function of its own, only chains that are stored as trained are trained."""
    metas = await turns.load_metas(connection, rollout_id, attempt)
    if config.endpoint is not None:
        metas = [replace(one, logprobs_valid=True) for one in metas]
    built = build_chains(metas, train_kinds=frozenset(config.training.train_kinds), drift=config.drift)
    built = [one for one in built if one.spans]
    if chosen_only and config.harness.generate is not None:
        chosen = await trained_leaves(connection, rollout_id)
        built = [one if one.leaf_turn_id in chosen else one.untrained() for one in built]
    return RolloutChains(built, len(metas), sum(chain.num_trained for chain in built))


def compute_outcome(
    function: str, grade: GradeTable, patch: PatchTable, agent_exit: str | None, built: RolloutChains
) -> OutcomeValues:
    """Return outcome and reward of a rollout with this grade. Raises ConfigError if the run's reward function fails."""
    facts = RewardFacts(agent_exit, built.num_turns, built.num_trained_tokens, patch.num_bytes, patch.num_files)
    reward = compute_reward(function, _verdict_of(grade), facts)
    return {
        "outcome": Outcome.REJECTED if grade.rejected else Outcome.GRADED,
        "outcome_reason": grade.reason,
        "reward": reward.value,
        "reward_components": reward.components,
        "grade_id": grade.id,
    }


def _verdict_of(grade: GradeTable) -> Verdict:
    """Return the stored verdict without its log, on which no reward may depend."""
    return Verdict(
        solved=grade.solved,
        reason=grade.reason,
        log="",
        duration_seconds=grade.duration_seconds,
        rejected=grade.rejected,
        rule=grade.rule,
        tests={str(name): str(outcome) for name, outcome in grade.tests.items()},
        fail_to_pass=_count_pair(grade.fail_to_pass),
        pass_to_pass=_count_pair(grade.pass_to_pass),
        rewards=grade.rewards,
    )


def _count_pair(value: list[int] | None) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))
