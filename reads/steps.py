"""One training step: what entered it, each rollout's share of its loss, and the tokens with the largest ratios."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.token_statistics import TrainedToken
from reads.conversation import main_command
from reads.curves import Metrics, metrics_by_step
from reads.groups import GroupLine, list_groups_of_step
from reads.rollout_list import RolloutLine, lines_of_ids
from reads.rollouts import PlannedUse, planned_uses
from reads.step_rows import DiscardedPlan, StepHead, discarded_plans, read_step_head, read_step_tokens
from reads.tokenizer import DecodesIds
from reads.turns import TurnContent, read_turns

_MAX_LOG_RATIO = 700.0


def loss_shares(uses: Mapping[int, PlannedUse], loss: Mapping[str, Any]) -> dict[int, float | None]:
    """Return each rollout's share of the step's sum of |token weight x advantage| over trained tokens, from 0 to 1.

    `loss`: the section of the step's knobs; the preset `sft` ignores advantages, so its shares are those of the token
    weights. Clipping does not count, nor do terms of the loss without an advantage (reference, teacher, entropy bonus).
    None for every rollout if the sum is 0; `why_no_shares` says why.
    """
    factor = float(loss.get("reward_factor", 1.0))
    parts = {
        rollout: factor * one.num_tokens * one.weight * (1.0 if loss.get("preset") == "sft" else abs(one.advantage))
        for rollout, one in uses.items()
    }
    total = sum(parts.values())
    return {rollout: part / total if total else None for rollout, part in parts.items()}


def why_no_shares(uses: Mapping[int, PlannedUse], loss: Mapping[str, Any]) -> str:
    """Return one sentence on why no rollout of the step has a share; empty if they have."""
    if not uses or any(share is not None for share in loss_shares(uses, loss).values()):
        return ""
    if not loss.get("reward_factor", 1.0):
        return "loss.reward_factor is 0, so rewards take no part in this step's loss."
    return "All advantages are 0, so rewards take no part in this step's loss."


@dataclass(slots=True, frozen=True)
class RatioToken:
    """A trained token with a ratio far from 1. `advantage`: of its rollout. `command`: of its turn."""

    token: TrainedToken
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
    tokens: list[RatioToken]


@dataclass(slots=True, frozen=True)
class StepMember:
    """A rollout of the step. `share`: of the loss, see `loss_shares`."""

    rollout: RolloutLine
    use: PlannedUse
    share: float | None


@dataclass(slots=True, frozen=True)
class StepFacts:
    """The facts about a step that its page, tools and sentences tell.

    `uses`: of all rollouts. `members`: a page of these, those with the largest share of the loss first, from the place
    `first` on; `no_shares`: why none has one, else empty. `discarded`: earlier plans of the step. `tokens`: those with
    the largest ratios, as the learner recorded them; `turns`: those of these tokens by id, without archived ones.
    """

    step: StepHead
    metrics: Metrics
    groups: Sequence[GroupLine] = ()
    uses: Mapping[int, PlannedUse] = field(default_factory=dict)
    members: Sequence[StepMember] = ()
    first: int = 0
    no_shares: str = ""
    discarded: Sequence[DiscardedPlan] = ()
    tokens: Sequence[TrainedToken] = ()
    turns: Mapping[int, TurnContent] = field(default_factory=dict)

    def command_of(self, token: TrainedToken) -> str:
        """Return the command that the token helped to write; empty if its turn is archived."""
        return main_command(self.turns[token.turn_id]) if token.turn_id in self.turns else ""

    def ratio_tokens(self, tokenizer: DecodesIds | None) -> list[RatioToken]:
        return [
            RatioToken(
                one,
                math.exp(min(one.logprob - one.behaviour, _MAX_LOG_RATIO)),
                tokenizer.decode([one.token_id], skip_special_tokens=False) if tokenizer else None,
                self.uses[one.rollout_id].advantage if one.rollout_id in self.uses else None,
                self.command_of(one),
            )
            for one in self.tokens
        ]


async def read_step_facts(
    connection: AsyncConnection, run_id: str, step: int, first: int = 0, limit: int = 0, around: int | None = None
) -> StepFacts | None:
    """Return the facts with `limit` members from the place `first` on, or with the page of the rollout `around`."""
    head = await read_step_head(connection, run_id, step)
    if head is None:
        return None
    uses = await planned_uses(connection, run_id, step)
    loss = head.knobs.get("loss", {})
    shares = loss_shares(uses, loss)
    order = sorted(uses, key=lambda one: -(shares[one] or 0.0))
    if around in uses:
        first = order.index(around) // limit * limit
    lines = await lines_of_ids(connection, order[first : first + limit])
    tokens = await read_step_tokens(connection, run_id, step)
    return StepFacts(
        head,
        (await metrics_by_step(connection, run_id, step, step)).get(step, {}),
        await list_groups_of_step(connection, run_id, step),
        uses,
        [StepMember(lines[one], uses[one], shares[one]) for one in order if one in lines],
        first,
        why_no_shares(uses, loss),
        await discarded_plans(connection, run_id, step),
        tokens,
        await read_turns(connection, {one.turn_id for one in tokens}),
    )


async def require_step(connection: AsyncConnection, run_id: str, step: int) -> StepFacts:
    """Return the facts about a step, without its members. Raises ConfigError if it does not exist."""
    if (found := await read_step_facts(connection, run_id, step)) is None:
        raise ConfigError(f"there is no step {step} of a run {run_id!r}; its metrics name its steps")
    return found


def group_ratio_tokens(tokens: Sequence[RatioToken]) -> list[RatioTokenGroup]:
    """Put equal tokens of equal commands together, in the order of the first of each."""
    groups: dict[tuple[int, str], list[RatioToken]] = {}
    for one in tokens:
        groups.setdefault((one.token.token_id, one.command), []).append(one)
    return [RatioTokenGroup(key[0], found[0].text, key[1], found) for key, found in groups.items()]
