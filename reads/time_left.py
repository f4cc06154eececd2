"""The time that a run still takes: its steps to come, and the evaluations that no step's duration holds."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.types import Purpose
from reads.curves import times_by_step
from reads.evaluations import EvaluationRate
from store import runs
from store.evaluation_plans import evaluations_of_step, planned_evaluations
from store.evaluations import BegunEvaluation

_STEPS_FOR_ESTIMATE = 5


def rollouts_of_run(config: RunConfig, num_held_out: int) -> int:
    """Return how many rollouts the run makes if every group has signal and no evaluation is asked for."""
    training, every = config.training, config.evaluation.every
    num_samples = sum(one.num_samples for one in planned_evaluations(config))
    if every is not None:
        num_between = max(0, training.steps - ("end" in config.evaluation.at)) // every
        num_samples += num_between * sum(one.num_samples for one in evaluations_of_step(config, every, (), ()))
    return training.steps * training.groups_per_step * training.group_size + num_samples * num_held_out


def num_to_evaluate(config: RunConfig, num_held_out: int, step: int, begun: Sequence[EvaluationRate]) -> int:
    """Return how many rollouts without an outcome the evaluations of this step and of the last one have. With
    `evaluation.every`, those between them are left out: the steps' durations hold them."""
    known = [BegunEvaluation(one.label, one.step, one.temperature, 0, one.ended_at is not None) for one in begun]
    num_open = {one.label: one.num_rollouts - one.num_ended for one in begun}
    last = max(step, config.training.steps)
    steps = {last} if step and config.evaluation.every is not None else {step, last}
    plans = [one for at in steps for one in evaluations_of_step(config, at, known, ())]
    return sum(num_open.get(one.label, one.num_samples * num_held_out) for one in plans)


def seconds_a_step(stepped_at: Sequence[float]) -> float | None:
    """Return the median duration of the newest steps, so that a pause or an outage during one of them does not count;
    None without two. `stepped_at`: the moments at which they were trained, oldest first."""
    durations = [end - start for start, end in pairwise(stepped_at[-_STEPS_FOR_ESTIMATE - 1 :])]
    return median(durations) if durations else None


def seconds_an_evaluation_rollout(evaluations: Sequence[EvaluationRate]) -> float | None:
    """Return the time per rollout of the newest evaluations that have ended; those of one step run side by side.
    `evaluations`: by step."""
    ended = [one for one in evaluations if one.ended_at is not None and one.num_rollouts]
    newest = [one for one in ended if one.step == ended[-1].step]
    if not newest:
        return None
    duration = max(one.ended_at for one in newest if one.ended_at) - min(one.created_at for one in newest)
    return duration.total_seconds() / sum(one.num_rollouts for one in newest)


async def read_seconds_left(
    connection: AsyncConnection,
    run_id: str,
    config: RunConfig,
    step: int,
    evaluations: Sequence[EvaluationRate],
    per_minute: float,
) -> float | None:
    """Estimate how long the run still takes after this step; None if no pace is known. `per_minute`: the rollouts that
    end a minute, which count until two steps are trained, or an evaluation has ended."""
    times = await times_by_step(connection, run_id, step - _STEPS_FOR_ESTIMATE, step)
    moments = [time.stepped_at.timestamp() for _, time in sorted(times.items()) if time.stepped_at is not None]
    num_held_out = await runs.count_run_tasks(connection, run_id, Purpose.EVAL)
    training, pace = config.training, 60 / per_minute if per_minute else 0.0
    a_step = seconds_a_step(moments) or training.groups_per_step * training.group_size * pace
    of_steps = max(0, training.steps - step) * a_step
    num_evaluated = num_to_evaluate(config, num_held_out, step, evaluations)
    of_evaluations = num_evaluated * (seconds_an_evaluation_rollout(evaluations) or pace)
    is_known = (of_steps or step >= training.steps) and (of_evaluations or not num_evaluated)
    return of_steps + of_evaluations if is_known else None
