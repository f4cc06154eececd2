"""Weight of one trained token in the loss of an update: the reducers of `loss.reducer`. No torch.

The weights are fixed when the step is planned. They depend on rollouts and groups only, not on how turns are cut into
chains, bins, micro-batches or ranks, so no gradient depends on that either.
"""

from collections.abc import Mapping


def reducer_weights(
    reducer: str, tokens: Mapping[int, int], group_of: Mapping[int, int], constant_tokens: int
) -> dict[int, float]:
    """Return, per rollout, the weight of one of its trained tokens within one update.

    `tokens`: rollout id -> T_i, its trained tokens over all its chains. Rollouts with T_i = 0 are not counted.
    `group_of`: rollout id -> group id. `constant_tokens`: the divisor of the reducer `constant`. Raises ValueError for
    an unknown reducer.

    token_mean    1 / sum of all T_i
    rollout_mean  1 / (number of rollouts x T_i)
    prompt_mean   1 / (number of groups x tokens of the group)
    constant      1 / (number of rollouts x constant_tokens)
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
