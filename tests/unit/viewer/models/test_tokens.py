"""Colours and hints of tokens."""

from ratchet.store.views.turn_views import ChainToken
from viewer.models.tokens import logprob_class, view_tokens


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
    for colour in ("mask", "logprob", "version"):
        assert shade(colour, sampled=False, trained=False, logprob=None, policy_step=None) == "context"


def test_classes_of_logprobs_grow_as_probability_falls() -> None:
    classes = [logprob_class(-value) for value in (0.0, 0.05, 0.3, 0.7, 1.5, 3, 5, 20)]
    assert classes == list(range(8))


def test_a_hint_says_everything_that_is_stored() -> None:
    (seen,) = view_tokens([token()], "mask", None, -0.25)
    assert seen.text is None
    assert seen.hint == (
        "position 4, id 17, turn 3, trained, recorded logprob -0.7000, weights of step 9, advantage -0.25"
    )
    (masked,) = view_tokens([token(trained=False)], "mask", None, -0.25)
    assert "advantage" not in masked.hint and "not trained" in masked.hint
