"""Runs beside each other: the settings that differ, and their evaluations on the same tasks."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.solve_rates import Estimate, interval
from reads.evaluation_report import evaluated_tasks
from reads.evaluations import EvaluationRate


@dataclass(slots=True, frozen=True)
class DifferentSetting:
    """`values`: one per run, None if it is not set."""

    key: str
    values: list[Any]


@dataclass(slots=True, frozen=True)
class PairedEvaluation:
    """Two evaluations, each RUN:LABEL, at one temperature. `difference`: of the mean rewards on the tasks that both
    have, second - first; `before`, `after`: the first and the second one's mean reward on these tasks."""

    first: str
    second: str
    temperature: float
    before: float
    after: Estimate
    difference: Estimate


def different_settings(configs: Sequence[Mapping[str, Any]]) -> list[DifferentSetting]:
    """Return the settings, by their dotted keys, that are not the same in all configs."""
    flat = [dict(_flatten(config)) for config in configs]
    keys = sorted({key for one in flat for key in one})
    found = [DifferentSetting(key, [one.get(key) for one in flat]) for key in keys]
    return [one for one in found if any(value != one.values[0] for value in one.values)]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


async def paired_evaluations(
    connection: AsyncConnection, rates: Mapping[str, Sequence[EvaluationRate]]
) -> list[PairedEvaluation]:
    """Compare the newest ended evaluations of each further run with those of the first one. `rates`: by run."""
    (first, before), *others = [
        (run_id, {one.temperature: one for one in sorted(found, key=lambda one: one.step) if one.ended_at is not None})
        for run_id, found in rates.items()
    ]
    pairs = [
        ((first, before[temperature]), (run_id, newest[temperature]))
        for run_id, newest in others
        for temperature in sorted(before.keys() & newest.keys())
    ]
    found = [await pair_evaluations(connection, *pair) for pair in pairs]
    return [one for one in found if one is not None]


async def pair_evaluations(
    connection: AsyncConnection, first: tuple[str, EvaluationRate], second: tuple[str, EvaluationRate]
) -> PairedEvaluation | None:
    """Compare two evaluations, each with its run, task by task; None without a common task."""
    tasks = [await evaluated_tasks(connection, run_id, one.label) for run_id, one in (first, second)]
    before, after = ({one.task: one.reward for one in side if one.reward is not None} for side in tasks)
    common = sorted(before.keys() & after.keys())
    if not common:
        return None
    rewards = np.array([[before[task], after[task]] for task in common])
    mean_after = await asyncio.to_thread(interval, rewards[:, 1])
    difference = await asyncio.to_thread(interval, rewards[:, 1] - rewards[:, 0])
    names = [f"{run_id}:{one.label}" for run_id, one in (first, second)]
    return PairedEvaluation(
        names[0], names[1], second[1].temperature, float(rewards[:, 0].mean()), mean_after, difference
    )
