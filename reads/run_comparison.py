"""Runs beside each other: the settings that differ, and their evaluations on the same tasks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.solve_rates import Estimate, compare
from reads.evaluation_report import evaluated_tasks
from reads.evaluations import EvaluationRate, evaluation_rates
from reads.runs import RunHead


@dataclass(slots=True, frozen=True)
class DifferentSetting:
    """`values`: one per run, None if it is not set."""

    key: str
    values: list[Any]


@dataclass(slots=True, frozen=True)
class PairedEvaluation:
    """The newest ended evaluations of two runs at one temperature. `difference`: second - first, over common tasks."""

    first: str
    second: str
    temperature: float
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


async def paired_evaluations(connection: AsyncConnection, runs: Sequence[RunHead]) -> list[PairedEvaluation]:
    """Compare each further run with the first one."""
    newest = [await _newest_by_temperature(connection, run.run_id) for run in runs]
    found = []
    for run, evaluations in zip(runs[1:], newest[1:], strict=True):
        for temperature in sorted(newest[0].keys() & evaluations.keys()):
            sides = ((runs[0].run_id, newest[0][temperature].label), (run.run_id, evaluations[temperature].label))
            first, second = [
                {one.task: one.count for one in await evaluated_tasks(connection, *side)} for side in sides
            ]
            names = [f"{run_id}:{label}" for run_id, label in sides]
            found.append(PairedEvaluation(names[0], names[1], temperature, compare(first, second).difference))
    return [one for one in found if one.difference.num_tasks]


async def _newest_by_temperature(connection: AsyncConnection, run_id: str) -> dict[float, EvaluationRate]:
    rates = await evaluation_rates(connection, run_id)
    return {one.temperature: one for one in sorted(rates, key=lambda one: one.step) if one.ended_at is not None}
