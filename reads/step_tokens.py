"""The tokens behind a step's ratios, each with its text, its advantage and the command that it helped to write."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reads.conversation import main_command
from reads.rollouts import PlannedUse
from reads.steps import StepToken
from reads.tokenizer import DecodesIds
from reads.turns import TurnContent

_MAX_LOG_RATIO = 700.0


@dataclass(slots=True, frozen=True)
class RatioTokenView:
    """A trained token with a ratio far from 1. `advantage`: of its rollout. `command`: of its turn."""

    token: StepToken
    ratio: float
    text: str | None
    advantage: float | None
    command: str


@dataclass(slots=True, frozen=True)
class RatioTokenGroup:
    """Tokens that are equal and helped to write the same command; the furthest from 1 comes first."""

    token_id: int
    text: str | None
    command: str
    tokens: list[RatioTokenView]


@dataclass(slots=True, frozen=True)
class TokenContext:
    """Data that explain a token: its rollout's use in the step, its turn (archived ones are missing), its tokenizer."""

    uses: Mapping[int, PlannedUse]
    turns: Mapping[int, TurnContent]
    tokenizer: DecodesIds | None

    def text_of(self, token_id: int) -> str | None:
        return self.tokenizer.decode([token_id], skip_special_tokens=False) if self.tokenizer else None

    def command_of(self, turn_id: int) -> str:
        return main_command(self.turns[turn_id]) if turn_id in self.turns else ""


def view_ratio_tokens(tokens: Sequence[StepToken], context: TokenContext) -> list[RatioTokenView]:
    return [
        RatioTokenView(
            one,
            math.exp(min(one.logprob - one.behaviour, _MAX_LOG_RATIO)),
            context.text_of(one.token_id),
            context.uses[one.rollout_id].advantage if one.rollout_id in context.uses else None,
            context.command_of(one.turn_id),
        )
        for one in tokens
    ]


def group_ratio_tokens(tokens: Sequence[RatioTokenView]) -> list[RatioTokenGroup]:
    """Put equal tokens of equal commands together, in the order of the first of each."""
    groups: dict[tuple[int, str], list[RatioTokenView]] = {}
    for one in tokens:
        groups.setdefault((one.token.token_id, one.command), []).append(one)
    return [RatioTokenGroup(key[0], found[0].text, key[1], found) for key, found in groups.items()]
