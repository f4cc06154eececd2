"""The evaluations that a run's config plans, and those of a step that have not ended."""

from collections.abc import Sequence

from ratchet.config import RunConfig
from ratchet.payloads import EvaluationPlan
from store.evaluations import AskedEvaluation, BegunEvaluation, temperature_label


def planned_evaluations(config: RunConfig) -> list[EvaluationPlan]:
    """Return the evaluations of step 0 and of the last step that `evaluation.at` names."""
    if not _has_held_out_tasks(config):
        return []
    steps = {"start": 0, "end": config.training.steps}
    return [
        _plan(config, when, steps[when], temperature)
        for when in config.evaluation.at
        for temperature in _at(config, when)
    ]


def evaluations_of_step(
    config: RunConfig, step: int, begun: Sequence[BegunEvaluation], asked: Sequence[AskedEvaluation]
) -> list[EvaluationPlan]:
    """Return the evaluations of one step that have not ended: those that have begun, those of `evaluation.at`, those
    every so many steps, and what people asked.

    The config plans one evaluation per step and temperature, also if it has changed since: an evaluation of the end
    that was made before steps were added goes on if it has not ended, and is not repeated if it has. A label stays with
    its step, so another evaluation of the end gets the step's number. What people ask is evaluated at the next step.
    """
    if not _has_held_out_tasks(config):
        return []
    here = [one for one in begun if one.step == step]
    labels = {one.label for one in begun}
    begun_here = {one.temperature for one in here if not one.is_asked}
    planned = [one for one in planned_evaluations(config) if one.step == step]
    every = config.evaluation.every
    if every is not None and step and step % every == 0 and not any(one.label.startswith("end-") for one in planned):
        planned += [_plan(config, f"step{step}", step, temperature) for temperature in _at(config, "end")]
    return [
        *(_with_label(one, one.label, step) for one in here if not one.has_ended),
        *(
            _with_label(one, f"{one.label}-{step}" if one.label in labels else one.label, step)
            for one in planned
            if one.temperature not in begun_here
        ),
        *(_with_label(one, one.label, step) for one in asked if one.label not in labels),
    ]


def _with_label(one: BegunEvaluation | AskedEvaluation | EvaluationPlan, label: str, step: int) -> EvaluationPlan:
    return EvaluationPlan(label=label, step=step, temperature=one.temperature, num_samples=one.num_samples)


def _has_held_out_tasks(config: RunConfig) -> bool:
    return any(dataset.use == "eval" for dataset in config.datasets)


def _at(config: RunConfig, when: str) -> list[float]:
    """Return the temperatures at one time, each once."""
    evaluation = config.evaluation
    more = evaluation.start_temperatures if when == "start" else []
    return list(dict.fromkeys([*evaluation.temperatures, *more]))


def _plan(config: RunConfig, when: str, step: int, temperature: float) -> EvaluationPlan:
    """A temperature in both lists takes `samples`; greedy decoding takes one."""
    evaluation = config.evaluation
    return EvaluationPlan(
        label=f"{when}-{temperature_label(temperature)}",
        step=step,
        temperature=temperature,
        num_samples=evaluation.samples if temperature > 0 and temperature in evaluation.temperatures else 1,
    )
