"""A run's own reward functions as people write them.

Why here: they are named by import path, as a config names them.
Called by: `tests/integration/workflows/test_rollout.py`.
"""

from activities.graders.base import Verdict
from activities.graders.rewards import Components, RewardFacts


def breaks(verdict: Verdict, facts: RewardFacts) -> tuple[float, Components]:
    components: Components = {"solved": float(verdict.solved)}
    return components["solved"] + components["bonus"], components
