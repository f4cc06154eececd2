"""Compute the reward of a verdict with the run's reward function.

A reward function is `function(verdict, facts) -> (value, components)`, one of this module or of the user's own; the
named components are stored beside the value. The reward of a rejected patch is capped at that of a patch that solves
nothing, so that cheating is never worth more than failing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from grading.base import Verdict, reward_number
from ratchet.errors import ConfigError
from ratchet.import_path import import_function
from ratchet.suggestions import did_you_mean


@dataclass(slots=True, frozen=True)
class RewardFacts:
    """Facts of the rollout. `agent_exit`: a value of `ratchet.types.AgentExit`, None if unknown."""

    agent_exit: str | None
    num_turns: int
    num_tokens: int
    patch_bytes: int
    patch_files: int


Components = dict[str, float]


class Reward(NamedTuple):
    value: float
    components: Components


RewardFunction = Callable[[Verdict, RewardFacts], tuple[float, Components]]
"""A user's function returns a pair; `Reward` is one, too."""


def _value(verdict: Verdict) -> float:
    """Return 1 for a solved task, else 0; for a reward file its number, or 0 if that claims a refuted success."""
    if verdict.rewards is None:
        return float(verdict.solved)
    number = reward_number(verdict.rewards)
    return number if verdict.solved or number < 1 else 0.0


def solved(verdict: Verdict, facts: RewardFacts) -> Reward:
    """Return 1 for a solved task, else 0; for a reward file its number."""
    return Reward(_value(verdict), {**(verdict.rewards or {}), "solved": float(verdict.solved)})


def _share(counts: tuple[int, int] | None, otherwise: float) -> float:
    return otherwise if counts is None or counts[1] == 0 else counts[0] / counts[1]


def fraction(verdict: Verdict, facts: RewardFacts) -> Reward:
    """Return the share of fail-to-pass tests that pass, 0 if a pass-to-pass test fails; without lists as `solved`."""
    fixed = _share(verdict.fail_to_pass, _value(verdict))
    kept = float(_share(verdict.pass_to_pass, 1.0) == 1.0)
    return Reward(fixed * kept, {"solved": float(verdict.solved), "fail_to_pass": fixed, "pass_to_pass_kept": kept})


def weighted(verdict: Verdict, facts: RewardFacts) -> Reward:
    """Return 0.5 for a solved task + 0.3 × share of fail-to-pass + 0.2 × share of pass-to-pass."""
    done = _value(verdict)
    fixed = _share(verdict.fail_to_pass, done)
    kept = _share(verdict.pass_to_pass, done)
    components = {"solved": done, "fail_to_pass": fixed, "pass_to_pass": kept}
    return Reward(0.5 * done + 0.3 * fixed + 0.2 * kept, components)


REWARD_FUNCTIONS: dict[str, RewardFunction] = {"solved": solved, "fraction": fraction, "weighted": weighted}


def find_reward(name: str) -> RewardFunction:
    """Return the function of this name or import path. Raises ConfigError if there is none."""
    if name in REWARD_FUNCTIONS:
        return REWARD_FUNCTIONS[name]
    if ":" not in name:
        raise ConfigError(
            f"grading.reward: {name!r} is none of {', '.join(REWARD_FUNCTIONS)}; "
            f"a function of yours is written module:function{did_you_mean(name, REWARD_FUNCTIONS)}"
        )
    return import_function("grading.reward", name)


def compute_reward(name: str, verdict: Verdict, facts: RewardFacts) -> Reward:
    """Compute the reward. Raises ConfigError if the run's own function fails or returns a number that is not finite."""
    function = find_reward(name)
    if not verdict.rejected:
        return _call(name, function, verdict, facts)
    not_solved = replace(
        verdict,
        solved=False,
        rewards=None,
        fail_to_pass=None if verdict.fail_to_pass is None else (0, verdict.fail_to_pass[1]),
        pass_to_pass=None if verdict.pass_to_pass is None else (0, verdict.pass_to_pass[1]),
    )
    reward = _call(name, function, not_solved, facts)
    bound = _call(name, function, replace(not_solved, rejected=False, rule=""), facts)
    return Reward(min(reward.value, bound.value), {**reward.components, "rejected": 1.0})


def _call(name: str, function: RewardFunction, verdict: Verdict, facts: RewardFacts) -> Reward:
    try:
        value, components = function(verdict, facts)
        number = float(value)
        parts = {str(key): float(part) for key, part in components.items()}
    except Exception as error:  # the user's own code may raise anything
        raise ConfigError(f"grading.reward: {name!r} failed: {type(error).__name__}: {error}") from error
    if not all(math.isfinite(one) for one in (number, *parts.values())):
        raise ConfigError(f"grading.reward: {name!r} gave {number}, {parts}; rewards and components must be finite")
    return Reward(number, parts)
