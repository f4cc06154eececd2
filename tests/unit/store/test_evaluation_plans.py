"""The planned evaluations of a run, and their rollouts per task."""

from typing import Any

from ratchet.config import RunConfig
from store.evaluation_plans import evaluations_of_step, planned_evaluations
from store.evaluations import AskedEvaluation, BegunEvaluation


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


def begun(label: str, step: int, temperature: float = 1.0, ended: bool = True) -> BegunEvaluation:
    return BegunEvaluation(label, step, temperature, 2, ended)


def labels(evaluation: dict[str, Any], step: int, *known: BegunEvaluation) -> list[str]:
    return [plan.label for plan in evaluations_of_step(config(evaluation), step, known, [])]


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
    assert labels(once, 7, begun("start-t1", 0), begun("end-t1", 7, ended=False)) == ["end-t1"]
    assert labels(once, 7, begun("start-t1", 0), begun("end-t1", 7)) == []
    assert labels(once, 7, begun("start-t1", 0), begun("end-t1", 4)) == ["end-t1-7"]
    assert labels(once, 7, begun("end-t1", 4), begun("end-t1-7", 7, ended=False)) == ["end-t1-7"]


def test_the_end_of_a_run_that_was_extended_is_not_evaluated_again() -> None:
    """At step 6, which was the last one, an evaluation is due every 3 steps, too."""
    every = {"temperatures": [1.0, 0.0], "every": 3}
    assert labels(every, 6, begun("end-t1", 6), begun("end-greedy", 6, 0.0)) == []
    assert labels(every, 6, begun("end-t1", 6)) == ["step6-greedy"], "only one temperature was evaluated"
    assert labels(every, 6, begun("asked1-t1", 6)) == ["step6-t1", "step6-greedy"], "with other samples, perhaps"


def test_what_has_begun_goes_on_whatever_the_config_says_now() -> None:
    """An evaluation that is run again after the run was extended, or after the temperatures were changed."""
    assert labels({"temperatures": [1.0]}, 6, begun("end-t1", 6, ended=False)) == ["end-t1"]
    changed = evaluations_of_step(config({"temperatures": [0.5]}), 7, [begun("end-t1", 7, ended=False)], [])
    assert [(plan.label, plan.temperature, plan.num_samples) for plan in changed] == [
        ("end-t1", 1.0, 2),
        ("end-t0.5", 0.5, 1),
    ]


def test_what_people_ask_is_evaluated_at_the_step_at_which_it_has_begun() -> None:
    asked = [AskedEvaluation("asked1-t0.5", 0.5, 4), AskedEvaluation("asked2-greedy", 0.0, 1)]
    first = begun("asked1-t0.5", 2, 0.5, ended=False)
    found = evaluations_of_step(config({}), 3, [first], asked)
    assert [(plan.label, plan.step, plan.num_samples) for plan in found] == [("asked2-greedy", 3, 1)]
    assert [plan.label for plan in evaluations_of_step(config({}), 2, [first], asked)] == [one.label for one in asked]
