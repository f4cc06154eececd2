"""Colours and hints of tokens."""

import math

import numpy as np
import pytest

from ratchet.token_statistics import TrainedTurn
from reads.turns import ChainToken
from viewer.models.tokens import LEGENDS, StepTraining, entropy_class, logprob_class, signed_class, view_tokens


def token(**values: object) -> ChainToken:
    plain = {"position": 4, "id": 17, "sampled": True, "trained": True, "logprob": -0.7, "policy_step": 9, "turn_id": 3}
    return ChainToken(**{**plain, **values})  # type: ignore[arg-type]


def shade(colour: str, **values: object) -> str:
    return view_tokens([token(**values)], colour, None, None)[0].shade


def test_shades() -> None:
    assert shade("mask") == "trained"
    assert shade("mask", trained=False) == "sampled"
    assert shade("logprob") == "p3"
    assert shade("version") == "v1"
    assert shade("version", policy_step=None) == "v-unknown"
    for colour in LEGENDS:
        assert shade(colour, sampled=False, trained=False, logprob=None, policy_step=None) == "context"


def test_classes_of_logprobs_grow_as_probability_falls() -> None:
    classes = [logprob_class(-value) for value in (0.0, 0.05, 0.3, 0.7, 1.5, 3, 5, 20)]
    assert classes == list(range(8))


def training(entropies: tuple[float, ...] = (0.5,), log_ratios: tuple[float, ...] = (0.25,)) -> StepTraining:
    """Of turn 3, whose trained tokens begin at position 4."""
    halves = (np.array(values, dtype=np.float16) for values in (entropies, log_ratios))
    return StepTraining(-0.25, 5, {3: TrainedTurn(3, 1, 4, *halves)})


def test_a_trained_token_has_what_the_learner_saw_at_its_place() -> None:
    seen = view_tokens([token(), token(position=5)], "entropy", None, training((0.5, 1.5), (0.25, -1.0)))
    assert [one.entropy for one in seen] == [0.5, 1.5] and [one.shade for one in seen] == ["p3", "p5"]
    assert [one.ratio for one in seen] == pytest.approx([math.exp(0.25), math.exp(-1)])
    assert [one.learner_logprob for one in seen] == pytest.approx([-0.45, -1.7])
    shades = {colour: view_tokens([token()], colour, None, training())[0].shade for colour in ("ratio", "advantage")}
    assert shades == {"ratio": "d5", "advantage": "d2"}


@pytest.mark.parametrize("colour", ["entropy", "ratio", "advantage"])
@pytest.mark.parametrize("values", [{"trained": False}, {"policy_step": 4}, {"policy_step": None}])
def test_what_was_not_trained_is_marked_and_has_no_values(colour: str, values: dict[str, object]) -> None:
    (seen,) = view_tokens([token(**values)], colour, None, training())
    assert (seen.shade, seen.in_step) == ("untrained", False) and "not trained" in seen.hint
    assert seen.advantage is seen.entropy is seen.learner_logprob is seen.ratio is None
    assert shade(colour) == "untrained", "no step has trained the rollout"


def test_a_missing_value_is_no_zero() -> None:
    for turns in (training((math.nan,), (math.inf,)), StepTraining(-0.25, 5, {}), training(())):
        for colour, wanted in (("entropy", "unknown"), ("ratio", "unknown"), ("advantage", "d2")):
            (seen,) = view_tokens([token()], colour, None, turns)
            assert seen.shade == wanted and seen.in_step
            assert seen.entropy is seen.ratio is seen.learner_logprob is None


def test_every_class_is_in_the_legend() -> None:
    for name, shades in (
        ("logprob", [f"p{logprob_class(-value)}" for value in (0.0, 0.05, 0.3, 0.7, 1.5, 3, 5, 20)]),
        ("entropy", [f"p{entropy_class(value)}" for value in (0.0, 0.05, 0.2, 0.5, 1, 1.5, 2.5, 9)]),
        ("advantage", [f"d{signed_class(value, (0.0, 0.5, 1.0))}" for value in (-2, -0.7, -0.1, 0, 0.1, 0.7, 2)]),
    ):
        assert shades == [one.shade for one in LEGENDS[name].entries][: len(shades)]


def test_a_hint_says_everything_that_is_stored() -> None:
    (seen,) = view_tokens([token()], "mask", None, training())
    assert seen.text is None
    assert seen.hint == (
        "position 4, id 17, turn 3, trained, recorded logprob -0.7000, weights of step 9, advantage -0.25, ratio 1.28, "
        "entropy 0.5 nats"
    )
