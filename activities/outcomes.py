"""What a rollout's stored grade and turns come to: verdict, chains, outcome and reward.

Why here: rewards are functions of verdicts, and a run can be paid anew from what is stored.
Called by: `activities/rollout_records.py` and `activities/regrade.py`.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.graders.base import Verdict
from activities.graders.rewards import RewardFacts, compute_reward
from adapter.turns.chains import TokenChain, build_chains
from ratchet.config import RunConfig
from ratchet.store import turns
from ratchet.store.schema import GradeTable, PatchTable
from ratchet.types import Outcome


def _pair(value: list[int] | None) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


def verdict_of_grade(grade: GradeTable) -> Verdict:
    """Without the log, which no reward may depend on."""
    return Verdict(
        solved=grade.solved,
        reason=grade.reason,
        log="",
        duration_seconds=grade.duration_seconds,
        rejected=grade.rejected,
        rule=grade.rule,
        tests={str(name): str(outcome) for name, outcome in grade.tests.items()},
        fail_to_pass=_pair(grade.fail_to_pass),
        pass_to_pass=_pair(grade.pass_to_pass),
    )


async def chains_of(
    connection: AsyncConnection, rollout_id: int, attempt: int, config: RunConfig
) -> tuple[list[TokenChain], dict[str, int]]:
    """The chains of an attempt's turns, to be stored, and the counts that its rollout's row keeps."""
    metas = await turns.load_metas(connection, rollout_id, attempt)
    built = build_chains(metas, train_kinds=frozenset(config.training.train_kinds), drift=config.drift)
    counts = {
        "num_turns": len(metas),
        "num_chains": sum(1 for chain in built if chain.num_trained),
        "num_trained_tokens": sum(chain.num_trained for chain in built),
    }
    return built, counts


def compute_outcome(
    function: str, grade: GradeTable, patch: PatchTable, agent_exit: str | None, counts: Mapping[str, int]
) -> dict[str, Any]:
    """Outcome and reward of a rollout that is paid by this grade. Raises ConfigError where the run's own reward function breaks."""
    facts = RewardFacts(agent_exit, counts["num_turns"], counts["num_trained_tokens"], patch.num_bytes, patch.num_files)
    value, components = compute_reward(function, verdict_of_grade(grade), facts)
    return {
        "outcome": Outcome.REJECTED if grade.rejected else Outcome.GRADED,
        "outcome_reason": grade.reason,
        "reward": value,
        "reward_components": components,
        "grade_id": grade.id,
    }
