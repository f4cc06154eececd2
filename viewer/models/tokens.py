"""Tokens of a chain with their texts and the class that colours them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from ratchet.store.views.turn_views import ChainToken

COLOURS = ("mask", "logprob", "version")
_LOGPROB_BOUNDS = (-0.01, -0.1, -0.5, -1.0, -2.0, -4.0, -8.0)
"""A token's logprob class is the number of bounds that it lies below."""
_NUM_VERSION_CLASSES = 8


class DecodesIds(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(slots=True, frozen=True)
class TokenView:
    """A token. `text` is None if the model's tokenizer is gone; `shade` is the class of its colour."""

    position: int
    id: int
    text: str | None
    shade: str
    hint: str
    turn_id: int
    logprob: float | None
    policy_step: int | None
    trained: bool
    sampled: bool


@lru_cache(maxsize=4)
def _load(path: str) -> DecodesIds:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


_LOADING = threading.Lock()


def load_tokenizer(model_path: str) -> DecodesIds | None:
    """Return the model's tokenizer, None if its directory is gone or holds none. It may take a second; call it in a
    thread."""
    path = Path(model_path) / "tokenizer.json"
    if not model_path or not path.is_file():
        return None
    with _LOADING:
        return _load(str(path))


def view_tokens(
    tokens: Sequence[ChainToken], colour: str, tokenizer: DecodesIds | None, advantage: float | None
) -> list[TokenView]:
    """Return the tokens with texts, shades and what a reader sees when pointing at one."""
    return [
        TokenView(
            one.position,
            one.id,
            tokenizer.decode([one.id], skip_special_tokens=False) if tokenizer else None,
            _shade(one, colour),
            _hint(one, advantage),
            one.turn_id,
            one.logprob,
            one.policy_step,
            one.trained,
            one.sampled,
        )
        for one in tokens
    ]


def logprob_class(logprob: float) -> int:
    """Return 0 for the most likely tokens and `len(_LOGPROB_BOUNDS)` for the least likely ones."""
    return sum(logprob < bound for bound in _LOGPROB_BOUNDS)


def _shade(token: ChainToken, colour: str) -> str:
    if not token.sampled:
        return "context"
    if colour == "logprob" and token.logprob is not None:
        return f"p{logprob_class(token.logprob)}"
    if colour == "version":
        return "v-unknown" if token.policy_step is None else f"v{token.policy_step % _NUM_VERSION_CLASSES}"
    return "trained" if token.trained else "sampled"


def _hint(token: ChainToken, advantage: float | None) -> str:
    words = [f"position {token.position}", f"id {token.id}", f"turn {token.turn_id}"]
    if not token.sampled:
        return ", ".join([*words, "context"])
    words.append("trained" if token.trained else "sampled, not trained")
    if token.logprob is not None:
        words.append(f"recorded logprob {token.logprob:.4f}")
    if token.policy_step is not None:
        words.append(f"weights of step {token.policy_step}")
    if advantage is not None and token.trained:
        words.append(f"advantage {advantage:+.3g}")
    return ", ".join(words)
