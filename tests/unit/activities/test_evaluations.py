"""The planned evaluations of a run, and their rollouts per task."""

from typing import Any

from activities.evaluations import evaluations_of_step, planned_evaluations
from ratchet.config import RunConfig
from ratchet.store.evaluations import AskedEvaluation


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


def labels(evaluation: dict[str, Any], step: int, known: dict[str, int] | None = None) -> list[str]:
    return [plan.label for plan in evaluations_of_step(config(evaluation), step, known or {}, [])]


def test_every_so_many_steps() -> None:
    every = {"temperatures": [1.0, 0.0], "every": 3}
    assert [labels(every, step) for step in range(8)] == [
        ["start-t1", "start-greedy"],
        [],
        [],
        ["step3-t1", "step3-greedy"],
        [],
        [],
        ["step6-t1", "step6-greedy"],
        ["end-t1", "end-greedy"],
    ]
    assert labels({"temperatures": [1.0], "every": 7}, 7) == ["end-t1"], "the end is evaluated once"
    assert labels({"temperatures": [1.0], "every": 7, "at": []}, 7) == ["step7-t1"]


def test_the_end_of_a_run_that_was_extended_has_a_label_of_its_own() -> None:
    once = {"temperatures": [1.0]}
    assert labels(once, 7, {"start-t1": 0, "end-t1": 7}) == ["end-t1"]
    assert labels(once, 7, {"start-t1": 0, "end-t1": 4}) == ["end-t1-7"]


def test_what_people_ask_is_evaluated_at_the_step_at_which_it_has_begun() -> None:
    asked = [AskedEvaluation("asked1-t0.5", 0.5, 4), AskedEvaluation("asked2-greedy", 0.0, 1)]
    found = evaluations_of_step(config({}), 3, {"asked1-t0.5": 2}, asked)
    assert [(plan.label, plan.step, plan.num_samples) for plan in found] == [("asked2-greedy", 3, 1)]
    assert len(evaluations_of_step(config({}), 2, {"asked1-t0.5": 2}, asked)) == 2
