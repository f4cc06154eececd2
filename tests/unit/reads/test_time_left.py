"""The rollouts that a run makes, those that its evaluations still make, and the pace of steps and evaluations."""

import itertools
from datetime import UTC, datetime, timedelta

import pytest

from ratchet.config import RunConfig
from reads.evaluations import EvaluationRate
from reads.time_left import num_to_evaluate, rollouts_of_run, seconds_a_step, seconds_an_evaluation_rollout
from store.evaluation_plans import evaluations_of_step
from tests.integration.training.records import make_config

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NUM_HELD_OUT = 99


def config(**evaluation: object) -> RunConfig:
    return make_config(
        datasets=[{"path": "train.jsonl"}, {"path": "heldout.jsonl", "use": "eval"}],
        training={"steps": 7, "groups_per_step": 5, "group_size": 8},
        evaluation={"temperatures": [1.0]} | evaluation,
    )


def evaluation(
    label: str, step: int, num_ended: int, minutes: int = 33, num_graded: int | None = None
) -> EvaluationRate:
    """An evaluation that takes 20 s per rollout if it is alone."""
    ended = NOW + timedelta(minutes=minutes) if num_ended == NUM_HELD_OUT else None
    sizes = (NUM_HELD_OUT, num_ended, NUM_HELD_OUT, num_ended if num_graded is None else num_graded)
    return EvaluationRate(label, step, 1.0, 1, "v", *sizes, 0.5, None, NOW, ended, num_ended=num_ended)


START = evaluation("start-t1", 0, NUM_HELD_OUT)


def test_a_run_has_its_steps_and_planned_evaluations() -> None:
    assert rollouts_of_run(config(), NUM_HELD_OUT) == 7 * 40 + 2 * NUM_HELD_OUT
    assert rollouts_of_run(config(every=2, samples=3), 10) == 7 * 40 + 5 * 30, "of steps 0, 2, 4, 6 and 7"
    assert rollouts_of_run(config(every=7), 10) == 7 * 40 + 2 * 10, "the end is one of every seven steps"
    assert rollouts_of_run(config(every=7, at=[]), 10) == 7 * 40 + 10
    assert rollouts_of_run(config(every=8, at=["end"]), 10) == 7 * 40 + 10


def test_a_long_run_is_counted_as_one_plans_it() -> None:
    """Step by step, as `evaluations_of_step` does."""
    for every, at in itertools.product((None, 1, 2, 3, 7, 9), ([], ["start"], ["end"], ["start", "end"])):
        of_run = config(every=every, at=at)
        plans = [one for step in range(8) for one in evaluations_of_step(of_run, step, (), ())]
        assert rollouts_of_run(of_run, 10) == 7 * 40 + 10 * sum(one.num_samples for one in plans), (every, at)


def test_evaluations_count_until_they_have_ended() -> None:
    assert num_to_evaluate(config(), NUM_HELD_OUT, 0, []) == 2 * NUM_HELD_OUT
    assert num_to_evaluate(config(), NUM_HELD_OUT, 3, [START]) == NUM_HELD_OUT
    assert num_to_evaluate(config(), NUM_HELD_OUT, 7, [START]) == NUM_HELD_OUT
    assert num_to_evaluate(config(), NUM_HELD_OUT, 7, [START, evaluation("end-t1", 7, 60)]) == 39
    assert num_to_evaluate(config(), NUM_HELD_OUT, 7, [START, evaluation("end-t1", 7, NUM_HELD_OUT)]) == 0


def test_rollouts_without_verdict_are_not_to_come() -> None:
    assert num_to_evaluate(config(), NUM_HELD_OUT, 7, [START, evaluation("end-t1", 7, 60, num_graded=10)]) == 39


def test_steps_hold_the_evaluations_between_them() -> None:
    between = evaluation("step2-t1", 2, 60)
    assert num_to_evaluate(config(every=2), NUM_HELD_OUT, 2, [START, between]) == NUM_HELD_OUT, "of step 7"
    assert num_to_evaluate(config(), NUM_HELD_OUT, 2, [START, between]) == 39 + NUM_HELD_OUT
    assert num_to_evaluate(config(), NUM_HELD_OUT, 3, [START, between]) == NUM_HELD_OUT, "nothing waits for it"
    assert num_to_evaluate(config(every=2), NUM_HELD_OUT, 0, []) == 2 * NUM_HELD_OUT


def test_an_asked_evaluation_does_not_stand_for_the_planned_one() -> None:
    asked = evaluation("asked1-t1", 7, NUM_HELD_OUT)
    assert num_to_evaluate(config(), NUM_HELD_OUT, 7, [START, asked]) == NUM_HELD_OUT


def test_the_newest_ended_evaluations_have_the_pace() -> None:
    assert seconds_an_evaluation_rollout([START]) == 20.0
    assert seconds_an_evaluation_rollout([]) is seconds_an_evaluation_rollout([evaluation("end-t1", 7, 60)]) is None
    beside = [evaluation(label, 7, NUM_HELD_OUT, 66) for label in ("end-greedy", "end-t1")]
    assert seconds_an_evaluation_rollout([START, *beside, evaluation("end-t2", 7, 60)]) == 20.0


def test_the_newest_steps_count() -> None:
    assert seconds_a_step([0.0, 100.0, 110.0, 120.0, 130.0, 140.0, 150.0]) == 10.0


@pytest.mark.parametrize("stalled", range(5))
def test_a_stall_during_one_step_does_not_count(stalled: int) -> None:
    assert seconds_a_step([10.0 * step + (3600.0 if step > stalled else 0.0) for step in range(6)]) == 10.0


def test_one_step_has_no_duration() -> None:
    assert seconds_a_step([5.0]) is None and seconds_a_step([]) is None
