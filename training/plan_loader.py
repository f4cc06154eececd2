"""Read what a training step needs: its plan row, and the token arrays of the rollouts that the row names."""

from collections.abc import Collection

import numpy as np
from sqlalchemy.ext.asyncio import AsyncConnection

from store import chains, plans
from store.chains import ChainArrays
from training.plan_types import Member, Plan, TrainingSequence


async def load_step_plan(connection: AsyncConnection, run_id: str, step: int) -> Plan | None:
    """Return the step's plan, or None if the step is not planned."""
    row = await plans.get_plan(connection, run_id, step)
    if row is None:
        return None
    return Plan(step, [Member(**member) for member in row.members], row.knobs["min_policy_step"], row.knobs, row.seed)


async def load_sequences(
    connection: AsyncConnection, rollout_ids: Collection[int], min_policy_step: int, with_experts: bool = False
) -> list[TrainingSequence]:
    """Return every chain of these rollouts that has a trained token, in order of (rollout, chain), by two queries.

    Tokens sampled under a policy step below `min_policy_step` are not trained. `with_experts`: with the experts that
    the engine chose. Raises ValueError for a chain whose trained tokens were sampled at different temperatures.
    """
    read = await chains.read_chains(connection, rollout_ids, with_experts=with_experts)
    found = [_training_sequence(chain, min_policy_step) for chain in read]
    return [sequence for sequence in found if sequence is not None]


def _training_sequence(chain: ChainArrays, min_policy_step: int) -> TrainingSequence | None:
    """Return the chain up to its last trained token, or None if no token is trained."""
    mask = chain.trained & (chain.policy_steps >= min_policy_step)
    if not mask.any():
        return None
    assert not mask[0], "a chain begins with context"
    end = int(np.flatnonzero(mask)[-1]) + 1
    behaviour = np.where(mask, chain.logprobs, np.float32(0))
    temperatures = np.unique(chain.temperatures[mask])
    if len(temperatures) > 1:
        raise ValueError(
            f"rollout {chain.rollout_id} was sampled at temperatures {temperatures.tolist()}; "
            "one chain has one temperature"
        )
    return TrainingSequence(
        rollout_id=chain.rollout_id,
        ids=chain.ids[:end],
        mask=mask[:end],
        behaviour=behaviour[:end],
        turn_ids=chain.turn_ids[:end],
        temperature=float(temperatures[0]),
        policy_steps=chain.policy_steps[:end],
        experts=None if chain.experts is None else chain.experts.cut(end),
    )
