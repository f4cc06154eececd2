"""A reward function of a user, named in a config by its import path."""

from grading.base import Verdict
from grading.rewards import Components, RewardFacts


def breaks(verdict: Verdict, facts: RewardFacts) -> tuple[float, Components]:
    components: Components = {"solved": float(verdict.solved)}
    return components["solved"] + components["bonus"], components
