"""Tokens of a chain with their texts, what the learner saw of them, and the class that colours them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ratchet.token_statistics import TrainedTurn
from reads.tokenizer import DecodesIds
from reads.turns import ChainToken

_LOGPROB_BOUNDS = (-0.01, -0.1, -0.5, -1.0, -2.0, -4.0, -8.0)
"""A token's logprob class is the number of bounds that it lies below."""
_ENTROPY_BOUNDS = (0.01, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0)
"""A token's entropy class is the number of bounds, in nats, that it lies above."""
_RATIO_BOUNDS = (1.05, 1.25, 2.0)
_ADVANTAGE_BOUNDS = (0.0, 0.5, 1.0)
"""The class of a ratio is 3 within the first bound of 1, and one more or less for each bound that it or its inverse
exceeds; that of an advantage alike, from 0."""
_NUM_VERSION_CLASSES = 8
_MAX_LOG_RATIO = 700.0


@dataclass(slots=True, frozen=True)
class LegendEntry:
    shade: str
    words: str


@dataclass(slots=True, frozen=True)
class Legend:
    """The meaning of the colours. `title`: the quantity and its unit, empty if the entries say all."""

    title: str
    entries: list[LegendEntry]


@dataclass(slots=True, frozen=True)
class StepTraining:
    """The training of a rollout's tokens in a step.

    `advantage`: of each trained token. `min_policy_step`: tokens of older weights were not trained. `turns`: what the
    learner saw, by turn.
    """

    advantage: float
    min_policy_step: int
    turns: Mapping[int, TrainedTurn]

    def trains(self, token: ChainToken) -> bool:
        return token.trained and (-1 if token.policy_step is None else token.policy_step) >= self.min_policy_step


@dataclass(slots=True, frozen=True)
class TokenView(ChainToken):
    """A token of a chain. `text` is None if the model's tokenizer is gone; `shade` is the class of its colour.

    `trained`: it is in the loss mask. `in_step`: the step has trained it; `advantage`, `entropy` (nats),
    `learner_logprob` and `ratio` are None otherwise, the last three also if no finite value is recorded.
    """

    text: str | None
    shade: str
    hint: str
    in_step: bool
    advantage: float | None
    entropy: float | None
    learner_logprob: float | None
    ratio: float | None


def view_tokens(
    tokens: Sequence[ChainToken], colour: str, tokenizer: DecodesIds | None, training: StepTraining | None
) -> list[TokenView]:
    """Return the tokens with texts, shades and what a reader sees when pointing at one.

    `training`: of the step whose values are shown, None if no step has trained the rollout.
    """
    return [_view(one, colour, tokenizer, training) for one in tokens]


def _view(token: ChainToken, colour: str, tokenizer: DecodesIds | None, training: StepTraining | None) -> TokenView:
    seen = _see(token, training)
    return TokenView(
        **asdict(token),
        text=tokenizer.decode([token.id], skip_special_tokens=False) if tokenizer else None,
        shade=_shade(token, seen, colour),
        hint=_hint(token, seen),
        in_step=seen.in_step,
        advantage=seen.advantage,
        entropy=seen.entropy,
        learner_logprob=None if seen.log_ratio is None or token.logprob is None else token.logprob + seen.log_ratio,
        ratio=seen.ratio,
    )


@dataclass(slots=True, frozen=True)
class _Seen:
    """The values that a step recorded for a token. None: the token was not trained, or no finite value is recorded."""

    in_step: bool
    advantage: float | None = None
    entropy: float | None = None
    log_ratio: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.log_ratio is None else math.exp(min(self.log_ratio, _MAX_LOG_RATIO))


def _see(token: ChainToken, training: StepTraining | None) -> _Seen:
    if training is None or not training.trains(token):
        return _Seen(False)
    turn = training.turns.get(token.turn_id)
    at = -1 if turn is None else token.position - turn.start
    if turn is None or not 0 <= at < len(turn.entropies):
        return _Seen(True, training.advantage)
    return _Seen(True, training.advantage, _finite(turn.entropies.item(at)), _finite(turn.log_ratios.item(at)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def logprob_class(logprob: float) -> int:
    """Return 0 for the most likely tokens and `len(_LOGPROB_BOUNDS)` for the least likely ones."""
    return sum(logprob < bound for bound in _LOGPROB_BOUNDS)


def entropy_class(entropy: float) -> int:
    """Return 0 for the surest distributions and `len(_ENTROPY_BOUNDS)` for the widest."""
    return sum(entropy > bound for bound in _ENTROPY_BOUNDS)


def signed_class(value: float, bounds: Sequence[float]) -> int:
    """Return 3 if |value| exceeds none of the three bounds, down to 0 for low and up to 6 for high values."""
    above = sum(abs(value) > bound for bound in bounds)
    return 3 + (above if value > 0 else -above)


def _shade(token: ChainToken, seen: _Seen, colour: str) -> str:
    if not token.sampled:
        return "context"
    match colour:
        case "logprob" if token.logprob is not None:
            return f"p{logprob_class(token.logprob)}"
        case "version":
            return "v-unknown" if token.policy_step is None else f"v{token.policy_step % _NUM_VERSION_CLASSES}"
        case "entropy" | "ratio" | "advantage" if not seen.in_step:
            return "untrained"
        case "entropy" if seen.entropy is not None:
            return f"p{entropy_class(seen.entropy)}"
        case "ratio" if seen.log_ratio is not None:
            return f"d{signed_class(seen.log_ratio, [math.log(bound) for bound in _RATIO_BOUNDS])}"
        case "advantage" if seen.advantage is not None:
            return f"d{signed_class(seen.advantage, _ADVANTAGE_BOUNDS)}"
        case "entropy" | "ratio" | "advantage":
            return "unknown"
    return "trained" if token.trained else "sampled"


def _legend(title: str, kind: str, words: Sequence[str], *others: LegendEntry) -> Legend:
    return Legend(title, [*(LegendEntry(f"{kind}{number}", one) for number, one in enumerate(words)), *others])


_CONTEXT = LegendEntry("context", "context")
_OF_LEARNER = (LegendEntry("unknown", "no finite value recorded"), LegendEntry("untrained", "not trained"), _CONTEXT)

LEGENDS: dict[str, Legend] = {
    "mask": Legend("", [LegendEntry("trained", "trained"), LegendEntry("sampled", "sampled, not trained"), _CONTEXT]),
    "logprob": _legend(
        "recorded logprob, in nats", "p", ["0", *(f"below {bound:g}" for bound in _LOGPROB_BOUNDS)], _CONTEXT
    ),
    "version": _legend(
        "weights of step, one colour each, repeated after eight", "v", list(map(str, range(8))), _CONTEXT
    ),
    "entropy": _legend(
        "entropy of the learner's distribution, in nats",
        "p",
        [f"at most {_ENTROPY_BOUNDS[0]:g}", *(f"above {bound:g}" for bound in _ENTROPY_BOUNDS)],
        *_OF_LEARNER,
    ),
    "ratio": _legend(
        "ratio of the learner's probability to the recorded one",
        "d",
        ["below 1/2", "1/2 to 1/1.25", "1/1.25 to 1/1.05", "about 1", "1.05 to 1.25", "1.25 to 2", "above 2"],
        *_OF_LEARNER,
    ),
    "advantage": _legend(
        "advantage, in units of the reward (std and batch: in standard deviations)",
        "d",
        ["below -1", "-1 to -0.5", "-0.5 to 0", "0", "0 to 0.5", "0.5 to 1", "above 1"],
        *_OF_LEARNER[1:],
    ),
}
"""The quantities that can colour tokens. The learner's values are those before the update that trained the token."""


def _hint(token: ChainToken, seen: _Seen) -> str:
    words = [f"position {token.position}", f"id {token.id}", f"turn {token.turn_id}"]
    if not token.sampled:
        return ", ".join([*words, "context"])
    words.append("trained" if seen.in_step else "not trained by a step" if token.trained else "sampled, not trained")
    if token.logprob is not None:
        words.append(f"recorded logprob {token.logprob:.4f}")
    if token.policy_step is not None:
        words.append(f"weights of step {token.policy_step}")
    if seen.advantage is not None:
        words.append(f"advantage {seen.advantage:+.3g}")
    if seen.ratio is not None:
        words.append(f"ratio {seen.ratio:.3g}")
    if seen.entropy is not None:
        words.append(f"entropy {seen.entropy:.3g} nats")
    return ", ".join(words)
