"""Report on a run's token streams: forks and unread calls by cause, chains per rollout, context per trained token, and
alarms.

Drift multiplies the chains of a rollout, and with them the cost of a step, without any error. `ratchet show forks`
shows the report; it is also computed for every planned step, for the metrics and the worker's log.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import ForkCause, TurnState, UnreadCause
from store.replayed_turns import COPIED
from store.schema import BatchItemTable, ChainTable, RolloutTable, TurnTable

DRIFT_SHARE = 0.02
"""Share of drifted turns above which an alarm is raised: sampled tokens are being re-tokenised."""
SPARE_CHAINS = 3
"""Number of chains of a rollout that are tolerated beyond those that sub-agents and compactions explain."""
CHANGED_SHARE = 0.01
"""Share of turns above which an alarm is raised: the parser changes calls, which the agent gets as text."""


@dataclass(frozen=True, slots=True)
class ForkReport:
    """The counts of a run or a step. `causes`: turns by cause, `none` for those that extend their lane.
    `unread_calls`: turns with a call that is text for the client, by `UnreadCause`."""

    run_id: str
    num_turns: int
    causes: dict[str, int]
    unread_calls: dict[str, int]
    kinds: dict[str, int]
    num_rollouts: int
    mean_chains: float
    most_chains: int
    num_trained_tokens: int
    context_per_trained_token: float
    alarms: list[str] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        """Return the values under their metric names."""
        return {
            "fork_drift_share": self.causes.get(ForkCause.DRIFT, 0) / max(self.num_turns, 1),
            "fork_chains_mean": self.mean_chains,
            "fork_chains_most": float(self.most_chains),
            "fork_context_per_trained_token": self.context_per_trained_token,
            "fork_alarms": float(len(self.alarms)),
        }


async def fork_report(connection: AsyncConnection, run_id: str, step: int | None = None) -> ForkReport:
    """Report on a run, or on the groups that a step has consumed. Turns of superseded attempts count, too."""
    counted_rollouts = RolloutTable.run_id == run_id
    if step is not None:
        consumed = select(BatchItemTable.group_id).where(BatchItemTable.run_id == run_id, BatchItemTable.step == step)
        counted_rollouts &= RolloutTable.group_id.in_(consumed)
    mine = counted_rollouts & (TurnTable.state == TurnState.COMPLETED) & (TurnTable.worker != COPIED)
    columns = (TurnTable.fork_cause, TurnTable.kind, TurnTable.unread_call)
    counted = select(*columns, func.count()).join(RolloutTable, RolloutTable.id == TurnTable.rollout_id)
    causes, kinds, unread = Counter[str](), Counter[str](), Counter[str]()
    for cause, kind, unread_call, number in await connection.execute(counted.where(mine).group_by(*columns)):
        causes[cause or "none"] += number
        kinds[kind] += number
        unread[unread_call or ""] += number
    del unread[""]
    rollouts = await _chains(connection, counted_rollouts)
    trained = sum(rollout.num_trained_tokens for rollout in rollouts)
    tokens = select(func.coalesce(func.sum(ChainTable.num_tokens), 0)).join(
        RolloutTable, RolloutTable.id == ChainTable.rollout_id
    )
    total = int((await connection.execute(tokens.where(counted_rollouts, ChainTable.num_trained > 0))).scalar_one())
    chains = [rollout.num_chains for rollout in rollouts]
    return ForkReport(
        run_id=run_id,
        num_turns=sum(causes.values()),
        causes=dict(causes.most_common()),
        unread_calls=dict(unread.most_common()),
        kinds=dict(kinds),
        num_rollouts=len(rollouts),
        mean_chains=sum(chains) / len(chains) if chains else 0.0,
        most_chains=max(chains, default=0),
        num_trained_tokens=trained,
        context_per_trained_token=(total - trained) / trained if trained else 0.0,
        alarms=_alarms(
            causes,
            [rollout for rollout in rollouts if rollout.num_chains > rollout.most_explained],
            unread[UnreadCause.CHANGED],
        ),
    )


class _RolloutChains(NamedTuple):
    """Chains of an ended rollout. `most_explained`: the number that its sub-agents and compactions explain."""

    rollout_id: int
    num_chains: int
    most_explained: int
    num_trained_tokens: int


async def _chains(connection: AsyncConnection, counted_rollouts: ColumnElement[bool]) -> list[_RolloutChains]:
    explaining = func.count(TurnTable.id).filter(TurnTable.fork_cause.in_([ForkCause.SUB_AGENT, ForkCause.COMPACTION]))
    statement = (
        select(
            RolloutTable.id,
            RolloutTable.num_chains,
            (explaining + 1 + SPARE_CHAINS).label("explained"),
            RolloutTable.num_trained_tokens,
        )
        .outerjoin(
            TurnTable,
            (TurnTable.rollout_id == RolloutTable.id)
            & (TurnTable.attempt == RolloutTable.attempt)
            & (TurnTable.state == TurnState.COMPLETED),
        )
        .where(counted_rollouts, RolloutTable.outcome.is_not(None))
        .group_by(RolloutTable.id)
        .order_by(RolloutTable.id)
    )
    return [_RolloutChains(*row) for row in await connection.execute(statement)]


def _alarms(causes: dict[str, int], unexplained: list[_RolloutChains], changed: int) -> list[str]:
    alarms = []
    turns, drifted = sum(causes.values()), causes.get(ForkCause.DRIFT, 0)
    if turns and drifted / turns > DRIFT_SHARE:
        alarms.append(
            f"{drifted} of {turns} turns drifted: equal messages came back in other tokens; "
            "compare request and answer of one of them"
        )
    if unexplained:
        named = ", ".join(f"{rollout.rollout_id} (K={rollout.num_chains})" for rollout in unexplained[:5])
        alarms.append(
            f"{len(unexplained)} rollouts have over {SPARE_CHAINS} chains more than sub-agents and compactions explain:"
            f" {named}"
        )
    if changed > CHANGED_SHARE * turns:
        alarms.append(
            f"{changed} of {turns} turns had a call that the parser would have changed, and that is text for the agent;"
            " compare the template with engine.tool_parser (`ratchet models check`)"
        )
    return alarms
