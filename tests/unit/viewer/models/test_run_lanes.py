"""The lanes of a run: every part in the window, the rollouts sampled, gaps named by what is waited for."""

from itertools import pairwise

import pytest

from reads.advice import Phase
from reads.run_times import CallUse
from tests.standins.pipeline import Pipeline, simulate
from viewer.models.run_lanes import MAX_ROLLOUTS, NUM_PARTS, run_lanes, use_window


def test_lanes_of_learner_engines_and_rollouts() -> None:
    times = simulate(Pipeline(boxes=6, learner=60.0))
    window = use_window(times)
    assert window is not None
    width = (window.end - window.start) / NUM_PARTS
    learner, evaluations, engines, boxes, *rollouts = run_lanes(times, window, [CallUse(3, 2 * width, 90)])
    assert all(0 <= bar.start <= bar.start + bar.width <= 1 + 1e-9 for lane in rollouts for bar in lane.bars)
    assert {bar.kind for bar in learner.bars} == {"waiting for a batch", Phase.TRAINING, Phase.SYNC}
    inside = [bar for bar in learner.bars if bar.start + bar.width < 1]
    assert all(one.start + one.width == pytest.approx(other.start) for one, other in pairwise(inside)), "no gap"
    assert engines.bars[0].start == pytest.approx(3 / NUM_PARTS) and "2.0 calls at once" in engines.bars[0].label
    assert {bar.kind for lane in rollouts for bar in lane.bars} >= {Phase.QUEUE, Phase.BOOT, Phase.SLOWEST}
    assert (evaluations.name, len(rollouts)) == ("evaluations", min(len(times.rollouts), len(rollouts)))
    assert f"{90 / width:.0f} tokens sampled a second" in engines.bars[0].label
    at_once = [float(bar.label.split()[0]) for bar in boxes.bars]
    assert 0 < max(at_once) <= 6.05 and max(bar.height for bar in boxes.bars) == 1, "there are six boxes"


def test_rollouts_are_sampled_evenly() -> None:
    times = simulate(Pipeline())
    times.rollouts = [one for one in times.rollouts for _ in range(1 + 450 // len(times.rollouts))]
    window = use_window(times)
    assert window is not None and len(times.rollouts) > 2 * MAX_ROLLOUTS
    rollouts = run_lanes(times, window, [])[4:]
    assert MAX_ROLLOUTS / 2 < len(rollouts) <= MAX_ROLLOUTS
