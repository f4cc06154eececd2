"""Select the groups that a step can learn from."""

from collections.abc import Sequence

from ratchet.config import RunConfig


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards differ; with equal rewards every advantage is 0."""
    return len(rewards) > 1 and max(rewards) > min(rewards)


def gives_gradient(rewards: Sequence[float], config: RunConfig) -> bool:
    """Return whether a group with these rewards can be trained: the rewards differ, or there is a teacher, who says
    something of every token."""
    return has_signal(rewards) or config.loss.distillation > 0
