"""How much one trained token counts within an update. No torch: the weights are fixed at planning, in a worker.

Why here: a separate axis from the loss; a weight knows rollouts and groups, never chains, bins or ranks.
Called by: `training/planner.py`.
"""

from collections.abc import Mapping


def reducer_weights(
    reducer: str, tokens: Mapping[int, int], group_of: Mapping[int, int], constant_tokens: int
) -> dict[int, float]:
    """Weight of one token's loss, per rollout, within one update.

    `tokens`: rollout → T_i, its trained tokens over all its chains. Rollouts with T_i = 0 count nowhere. The weights do not know how
    turns are cut into chains, bins, micro-batches or ranks, so no gradient can depend on it.
    """
    trained = {rollout: count for rollout, count in tokens.items() if count > 0}
    if reducer == "token_mean":
        total = sum(trained.values())
        return dict.fromkeys(trained, 1 / total if total else 0.0)
    if reducer == "rollout_mean":
        return {rollout: 1 / (len(trained) * count) for rollout, count in trained.items()}
    if reducer == "constant":
        return dict.fromkeys(trained, 1 / (len(trained) * constant_tokens) if trained else 0.0)
    if reducer == "prompt_mean":
        group_tokens: dict[int, int] = {}
        for rollout, count in trained.items():
            group_tokens[group_of[rollout]] = group_tokens.get(group_of[rollout], 0) + count
        return {rollout: 1 / (len(group_tokens) * group_tokens[group_of[rollout]]) for rollout in trained}
    raise ValueError(f"reducer {reducer!r} is unknown; expected token_mean, rollout_mean, prompt_mean or constant")
