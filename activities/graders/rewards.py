"""How a verdict becomes a reward: a function by name, or by import path, of the verdict and the facts of the rollout.

Why here: graders say what happened, a run says what it is worth; the named components are stored beside the value.
Called by: `activities/rollout_records.py`.

A reward function is `function(verdict, facts) -> (value, components)`. A rejected verdict is worth no more than the same verdict not solved
with no test passed, whatever the function says, so cheating never pays.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from activities.graders.base import Verdict
from ratchet.errors import ConfigError
from ratchet.import_path import import_object


@dataclass(slots=True, frozen=True)
class RewardFacts:
    """Of the rollout, beside its verdict. `agent_exit`: a value of `ratchet.types.AgentExit`, None where it is not known."""

    agent_exit: str | None
    num_turns: int
    num_tokens: int
    patch_bytes: int
    patch_files: int


Components = dict[str, float]
RewardFunction = Callable[[Verdict, RewardFacts], tuple[float, Components]]


def solved(verdict: Verdict, facts: RewardFacts) -> tuple[float, Components]:
    """1 or 0."""
    value = float(verdict.solved)
    return value, {"solved": value}


def _share(counts: tuple[int, int] | None, otherwise: float) -> float:
    return otherwise if counts is None or counts[1] == 0 else counts[0] / counts[1]


def fraction(verdict: Verdict, facts: RewardFacts) -> tuple[float, Components]:
    """The share of fail-to-pass tests that pass, and 0 as soon as a pass-to-pass test broke; without lists the same as `solved`."""
    fixed = _share(verdict.fail_to_pass, float(verdict.solved))
    kept = float(_share(verdict.pass_to_pass, 1.0) == 1.0)
    return fixed * kept, {"solved": float(verdict.solved), "fail_to_pass": fixed, "pass_to_pass_kept": kept}


def weighted(verdict: Verdict, facts: RewardFacts) -> tuple[float, Components]:
    """Half for being solved, three tenths for the share of fail-to-pass, two tenths for the share of pass-to-pass."""
    fixed = _share(verdict.fail_to_pass, float(verdict.solved))
    kept = _share(verdict.pass_to_pass, float(verdict.solved))
    done = float(verdict.solved)
    return 0.5 * done + 0.3 * fixed + 0.2 * kept, {"solved": done, "fail_to_pass": fixed, "pass_to_pass": kept}


BY_NAME: dict[str, RewardFunction] = {"solved": solved, "fraction": fraction, "weighted": weighted}


def find_reward(name: str) -> RewardFunction:
    """Raises ConfigError for a name that is neither ours nor `module:function`."""
    if name in BY_NAME:
        return BY_NAME[name]
    if ":" not in name:
        raise ConfigError(
            f"grading.reward: {name!r} is none of {', '.join(BY_NAME)}; a function of yours is written module:function"
        )
    try:
        function: RewardFunction = import_object(name)
    except ImportError as error:
        raise ConfigError(f"grading.reward: {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(f"grading.reward: {name!r} is no function")
    return function


def compute_reward(name: str, verdict: Verdict, facts: RewardFacts) -> tuple[float, Components]:
    """The value, finite, and its components. Raises ConfigError where the run's own function breaks or gives no finite number."""
    function = find_reward(name)
    if not verdict.rejected:
        return _called(name, function, verdict, facts)
    nothing = replace(
        verdict,
        solved=False,
        fail_to_pass=None if verdict.fail_to_pass is None else (0, verdict.fail_to_pass[1]),
        pass_to_pass=None if verdict.pass_to_pass is None else (0, verdict.pass_to_pass[1]),
    )
    value, components = _called(name, function, nothing, facts)
    bound, _ = _called(name, function, replace(nothing, rejected=False, rule=""), facts)
    return min(value, bound), {**components, "rejected": 1.0}


def _called(name: str, function: RewardFunction, verdict: Verdict, facts: RewardFacts) -> tuple[float, Components]:
    try:
        value, components = function(verdict, facts)
        number, parts = float(value), {str(key): float(part) for key, part in components.items()}
    except Exception as error:  # the user's own code: whatever it raises is named, with the function
        raise ConfigError(f"grading.reward: {name!r} failed: {type(error).__name__}: {error}") from error
    if not all(math.isfinite(one) for one in (number, *parts.values())):
        raise ConfigError(f"grading.reward: {name!r} gave {number}, {parts}; rewards and components must be finite")
    return number, parts
