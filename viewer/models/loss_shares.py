"""How much of a step's policy-gradient loss each of its rollouts carries."""

from collections.abc import Mapping

from ratchet.store.views.rollout_views import PlannedUse


def loss_shares(uses: Mapping[int, PlannedUse], preset: str | None) -> dict[int, float | None]:
    """Return each rollout's share of the step's sum of |token weight x advantage| over trained tokens, from 0 to 1.

    `preset`: `loss.preset` of the step; `sft` ignores advantages, so its shares are those of the token weights.
    Clipping does not count, nor do terms of the loss without an advantage (reference, teacher, entropy bonus). None for
    every rollout if the sum is 0, as it is for plan rows of earlier versions, which have no token weights.
    """
    parts = {
        rollout: one.num_tokens * one.weight * (1.0 if preset == "sft" else abs(one.advantage))
        for rollout, one in uses.items()
    }
    total = sum(parts.values())
    return {rollout: part / total if total else None for rollout, part in parts.items()}
