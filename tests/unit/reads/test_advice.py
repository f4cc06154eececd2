"""The advice of `ratchet explain --advice` against simulated runs: it names what would in fact shorten the run most."""

from dataclasses import replace
from itertools import pairwise

import pytest

from reads.advice import NO_USE, SETTINGS, Phase, advise_run, spans_of, step_spans
from reads.run_times import BoxTimes, Interval, RolloutTimes, RunTimes, TrainedStepTimes
from tests.standins.pipeline import Pipeline, duration, simulate

BOTTLENECKS = {
    Phase.QUEUE: Pipeline(boxes=6),
    Phase.BOOT: Pipeline(boot=40.0),
    Phase.ENGINE: Pipeline(engine=60.0),
    Phase.NO_ENGINE: Pipeline(no_engine=60.0),
    Phase.TOOLS: Pipeline(tools=60.0),
    Phase.GRADING: Pipeline(grade=60.0),
    Phase.SLOWEST: Pipeline(straggler=12.0),
    Phase.TRAINING: Pipeline(learner=60.0, staleness=1),
    Phase.SYNC: Pipeline(sync=60.0, staleness=1),
    Phase.EVALUATION: Pipeline(evaluation=150.0, staleness=1),
    NO_USE: Pipeline(useless=6),
}
"""A run of each kind that is slow for one reason."""


def without(settings: Pipeline, cause: str) -> Pipeline:
    """The run in which one cause is as good as gone."""
    changes = {
        Phase.QUEUE: {"boxes": 1000},
        Phase.BOOT: {"boot": 0.0},
        Phase.ENGINE: {"engine": 0.0},
        Phase.NO_ENGINE: {"no_engine": 0.0},
        Phase.TOOLS: {"tools": 0.0},
        Phase.GRADING: {"grade": 0.0},
        Phase.SLOWEST: {"straggler": 1.0},
        Phase.TRAINING: {"learner": 0.0},
        Phase.SYNC: {"sync": 0.0},
        Phase.EVALUATION: {"evaluation": 0.0},
        NO_USE: {"useless": 0},
    }
    return replace(settings, **changes[cause])


@pytest.mark.parametrize("cause", list(BOTTLENECKS))
def test_the_advice_is_what_would_shorten_the_run_most(cause: str) -> None:
    settings = BOTTLENECKS[cause]
    saved = {one: duration(simulate(settings)) - duration(simulate(without(settings, one))) for one in BOTTLENECKS}
    assert max(saved, key=lambda one: saved[one]) == cause, "the simulation has this bottleneck"
    found = advise_run(simulate(settings))
    assert found.cause == cause
    assert found.setting and 0.3 < found.share <= 1.0


def test_the_phases_add_up_to_the_life_of_every_rollout() -> None:
    times = simulate(Pipeline(boxes=20, straggler=3.0, evaluation=20.0, staleness=1, useless=2))
    steps = {one.step: one for one in times.steps}
    ends = {
        one.group_id: steps[one.step].stepped + steps[one.step].sync_seconds if one.use == "trained" else one.ready
        for one in times.groups
        if one.step in steps
    }
    lives = sum(ends[one.group_id] - one.created for one in times.rollouts if one.group_id in ends)
    found = advise_run(times)
    assert sum(found.hours.values()) * 3600 == pytest.approx(lives)
    assert sum(found.causes.values()) == pytest.approx(sum(found.hours.values()))
    assert found.num_trained_tokens == 100 * sum(
        one.group_id in {group.group_id for group in times.groups if group.use == "trained"} for one in times.rollouts
    )
    assert found.as_json()["sampled_tokens_per_trained_token"] > 1, "groups without use were sampled, too"


@pytest.mark.parametrize(
    ("evaluations", "phases"),
    [
        ([], {Phase.OTHER: 55.0, Phase.TRAINING: 2.0}),
        ([Interval(0.0, 156.0)], {Phase.TRAINING: 2.0, Phase.EVALUATION: 55.0}),
    ],
)
def test_a_step_waits_for_its_learner_or_for_an_evaluation(
    evaluations: list[Interval], phases: dict[Phase, float]
) -> None:
    step = TrainedStepTimes(1, planned=100.0, stepped=157.0, sync_seconds=1.0, worked_seconds=2.0)
    spans = step_spans(step, evaluations)
    assert {phase: one.end - one.start for one in spans for phase in one.shares} == phases
    assert (spans[0].start, spans[-1].end) == (100.0, 157.0) and spans[0].end == spans[1].start
    (whole,) = step_spans(replace(step, worked_seconds=None), evaluations)
    assert whole.shares == {Phase.TRAINING: 1.0}, "the learner did not say how long it worked"


def test_a_rollout_that_lost_its_box_and_has_no_times_is_still_whole() -> None:
    rollout = RolloutTimes(1, 1, 0.0, 100.0, None)
    rollout.boxes = [BoxTimes(False, 10.0, 12.0, 30.0), BoxTimes(False, 35.0, None, 50.0), BoxTimes(True, 60, 61, None)]
    rollout.call_seconds = 1000.0  # calls of several lanes overlap
    spans = spans_of(rollout)
    assert (spans[0].start, spans[0].end) == (0.0, 10.0)
    assert all(one.end == other.start for one, other in pairwise(spans))
    assert spans[-1].end == 100.0 and all(sum(one.shares.values()) == pytest.approx(1.0) for one in spans)


def test_a_run_without_a_trained_step_gets_no_advice() -> None:
    found = advise_run(RunTimes("r", [], [], [], []))
    assert (found.cause, found.hours, found.as_json()["box_hours_per_million_trained_tokens"]) == ("", {}, None)


def test_every_phase_has_a_setting() -> None:
    assert set(SETTINGS) == {*Phase, NO_USE}
