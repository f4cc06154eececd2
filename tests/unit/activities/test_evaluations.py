"""The planned evaluations of a run, and their rollouts per task."""

from typing import Any

from activities.evaluations import planned_evaluations
from ratchet.config import RunConfig


def config(evaluation: dict[str, Any]) -> RunConfig:
    datasets = [{"path": "tasks.jsonl"}, {"path": "heldout.jsonl", "use": "eval"}]
    return RunConfig.model_validate(
        {"model": "tiny", "datasets": datasets, "training": {"steps": 7}, "evaluation": evaluation}
    )


def test_only_the_sampled_rate_before_and_after_takes_more_than_one_rollout_of_a_task() -> None:
    planned = planned_evaluations(config({"temperatures": [1.0, 0.0], "start_temperatures": [0.3, 0.6], "samples": 2}))
    assert {plan.label: (plan.step, plan.num_samples) for plan in planned} == {
        "start-t1": (0, 2),
        "start-greedy": (0, 1),
        "start-t0.3": (0, 1),
        "start-t0.6": (0, 1),
        "end-t1": (7, 2),
        "end-greedy": (7, 1),
    }


def test_a_temperature_that_is_named_twice_is_evaluated_once() -> None:
    planned = planned_evaluations(config({"temperatures": [1.0], "start_temperatures": [1.0], "samples": 2}))
    assert [(plan.label, plan.num_samples) for plan in planned] == [("start-t1", 2), ("end-t1", 2)]
