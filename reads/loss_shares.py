"""The share of each rollout in a step's policy-gradient loss."""

from collections.abc import Mapping
from typing import Any

from reads.rollouts import PlannedUse


def loss_shares(uses: Mapping[int, PlannedUse], loss: Mapping[str, Any]) -> dict[int, float | None]:
    """Return each rollout's share of the step's sum of |token weight x advantage| over trained tokens, from 0 to 1.

    `loss`: the section of the step's knobs; the preset `sft` ignores advantages, so its shares are those of the token
    weights. Clipping does not count, nor do terms of the loss without an advantage (reference, teacher, entropy bonus).
    None for every rollout if the sum is 0; `why_no_shares` says why.
    """
    factor = float(loss.get("reward_factor", 1.0))
    parts = {
        rollout: factor * one.num_tokens * one.weight * (1.0 if loss.get("preset") == "sft" else abs(one.advantage))
        for rollout, one in uses.items()
    }
    total = sum(parts.values())
    return {rollout: part / total if total else None for rollout, part in parts.items()}


def why_no_shares(uses: Mapping[int, PlannedUse], loss: Mapping[str, Any]) -> str:
    """Return one sentence on why no rollout of the step has a share; empty if they have."""
    if not uses or any(share is not None for share in loss_shares(uses, loss).values()):
        return ""
    if not loss.get("reward_factor", 1.0):
        return "loss.reward_factor is 0, so rewards take no part in this step's loss."
    return "All advantages are 0, so rewards take no part in this step's loss."
