"""Chains: store the spans that `adapter/turns/loss_mask.py` has decided, and read them back as arrays.

Training and export use the same reader, so an export contains exactly what is trained.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import ARRAY, BigInteger, any_, delete, func, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.routed_experts import ExpertIds, RoutedExperts
from ratchet.types import JsonObject, policy_step
from store.arrays import experts_from_bytes, ids_from_bytes, logprobs_from_bytes
from store.schema import ChainSpanTable, ChainTable, TurnTable


@dataclass(frozen=True, slots=True)
class TrainSpan:
    """Tokens [start, start + length) of a chain, as in `chain_span`. `source_start`: offset in suffix or output."""

    turn_id: int
    sampled: bool
    trained: bool
    start: int
    length: int
    source_start: int = 0


@dataclass(frozen=True, slots=True)
class TokenChain:
    """One sequence; without trained tokens it is context only and not in K, the chains that share the reward."""

    leaf_turn_id: int
    spans: tuple[TrainSpan, ...]

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def num_trained(self) -> int:
        return sum(span.length for span in self.spans if span.trained)

    def untrained(self) -> "TokenChain":
        return replace(self, spans=tuple(replace(span, trained=False) for span in self.spans))


async def replace_chains(connection: AsyncConnection, rollout_id: int, built: Sequence[TokenChain]) -> None:
    """Store the rollout's chains in place of all earlier ones."""
    await connection.execute(delete(ChainTable).where(ChainTable.rollout_id == rollout_id))
    if not built:
        return
    rows = [
        {"rollout_id": rollout_id, "no": no, "leaf_turn_id": chain.leaf_turn_id}
        | {"num_tokens": chain.num_tokens, "num_trained": chain.num_trained}
        for no, chain in enumerate(built)
    ]
    inserted = await connection.execute(insert(ChainTable).returning(ChainTable.id, ChainTable.no), rows)
    id_of = {row.no: row.id for row in inserted}
    spans = [
        {"chain_id": id_of[no], "no": number, **asdict(span)}
        for no, chain in enumerate(built)
        for number, span in enumerate(chain.spans)
    ]
    await connection.execute(insert(ChainSpanTable), spans)


async def trained_leaves(connection: AsyncConnection, rollout_id: int) -> set[int]:
    """Return the last turns of the stored chains that are trained."""
    trained = select(ChainTable.leaf_turn_id).where(ChainTable.rollout_id == rollout_id, ChainTable.num_trained > 0)
    return set((await connection.execute(trained)).scalars())


def steps_of_spans(spans: Sequence[JsonObject] | None, length: int) -> npt.NDArray[np.int32]:
    """Return the policy step of each sampled token, shape (length,); -1 if no policy version was recorded."""
    steps = np.full(length, -1, dtype=np.int32)
    for span in spans or []:
        version = span["version"] or ""
        steps[span["start"] : span["end"]] = policy_step(version) if "/" in version else -1
    return steps


async def trained_tokens(
    connection: AsyncConnection, rollout_ids: Collection[int], min_policy_step: int
) -> dict[int, int]:
    """Return T_i by rollout: trained tokens sampled under `min_policy_step` or later. Reads no token arrays."""
    statement = (
        select(
            ChainTable.rollout_id,
            ChainSpanTable.length,
            ChainSpanTable.source_start,
            TurnTable.num_sampled,
            TurnTable.version_spans,
        )
        .join(ChainSpanTable, ChainSpanTable.chain_id == ChainTable.id)
        .join(TurnTable, TurnTable.id == ChainSpanTable.turn_id)
        .where(ChainTable.rollout_id.in_(rollout_ids), ChainSpanTable.trained)
    )
    totals: dict[int, int] = {}
    for rollout_id, length, source_start, num_sampled, version_spans in await connection.execute(statement):
        steps = steps_of_spans(version_spans, num_sampled)[source_start : source_start + length]
        totals[rollout_id] = totals.get(rollout_id, 0) + int((steps >= min_policy_step).sum())
    return totals


async def longest_chains(connection: AsyncConnection, rollout_ids: Collection[int]) -> dict[int, int]:
    """Return, by rollout, the length of its longest chain up to the last trained token, which must fit into one bin."""
    ends = select(ChainTable.rollout_id, func.max(ChainSpanTable.start + ChainSpanTable.length)).join(
        ChainSpanTable, ChainSpanTable.chain_id == ChainTable.id
    )
    rows = await connection.execute(
        ends.where(ChainTable.rollout_id.in_(rollout_ids), ChainSpanTable.trained).group_by(ChainTable.rollout_id)
    )
    return {row[0]: int(row[1]) for row in rows}


@dataclass(slots=True, frozen=True)
class ChainArrays:
    """One chain; all arrays have shape (T,).

    `logprobs`: recorded under the policy that sampled the token, 0 for context, NaN in an endpoint's answer.
    `policy_steps`: -1 for context. `sampled`: the policy sampled the token, whether or not it is trained.
    `temperatures`: sampling temperature of the token's turn, 1 in an endpoint's answer. `experts`: those that the
    engine chose, None if they were not asked for.
    """

    rollout_id: int
    no: int
    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    policy_steps: npt.NDArray[np.int32]
    turn_ids: npt.NDArray[np.int64]
    sampled: npt.NDArray[np.bool_]
    temperatures: npt.NDArray[np.float64]
    experts: RoutedExperts | None = None


async def read_chains(
    connection: AsyncConnection, rollout_ids: Collection[int], trained_only: bool = True, with_experts: bool = False
) -> list[ChainArrays]:
    """Return the chains of these rollouts in order of (rollout, chain), in two queries.

    `trained_only` leaves out chains without a trained token. `with_experts` reads the recorded experts, too, which take
    far more memory than all else.
    """
    spans = (
        await connection.execute(
            select(ChainTable.rollout_id, ChainTable.no.label("chain_no"), ChainTable.num_tokens, ChainSpanTable)
            .join(ChainSpanTable, ChainSpanTable.chain_id == ChainTable.id)
            .where(ChainTable.rollout_id.in_(rollout_ids), ChainTable.num_trained > (0 if trained_only else -1))
            .order_by(ChainTable.rollout_id, ChainTable.no, ChainSpanTable.no)
        )
    ).all()
    # One array parameter, because Postgres takes 32767 parameters in a statement and a step may have more turns.
    turn_ids = literal(sorted({row.turn_id for row in spans}), ARRAY(BigInteger))
    columns = select(
        TurnTable.id,
        TurnTable.suffix_ids,
        TurnTable.sampled_ids,
        TurnTable.logprobs,
        TurnTable.version_spans,
        TurnTable.temperature,
        TurnTable.kept_tokens,
        *([TurnTable.routed_experts] if with_experts else []),
    ).where(TurnTable.id == any_(turn_ids))
    turns = {row.id: row for row in await connection.execute(columns)}
    experts: dict[int, ExpertIds] = {}
    if with_experts:
        experts = {row.id: experts_from_bytes(row.routed_experts) for row in turns.values() if row.routed_experts}
    chains: dict[tuple[int, int], ChainArrays] = {}
    for span in spans:
        key = (span.rollout_id, span.chain_no)
        if key not in chains:
            like = next(iter(experts.values()), None)
            unknown = RoutedExperts.unknown(span.num_tokens, like) if with_experts else None
            chains[key] = empty_chain(span.rollout_id, span.chain_no, span.num_tokens, unknown)
        _fill_span(chains[key], span, turns[span.turn_id])
        if span.turn_id in experts:
            _fill_experts(chains[key], span, turns[span.turn_id].kept_tokens, experts[span.turn_id])
    return list(chains.values())


def empty_chain(rollout_id: int, no: int = 0, num_tokens: int = 0, experts: RoutedExperts | None = None) -> ChainArrays:
    """Return a chain to be filled; without tokens it stands for a rollout that has none."""
    return ChainArrays(
        rollout_id,
        no,
        np.zeros(num_tokens, dtype=np.int32),
        np.zeros(num_tokens, dtype=np.bool_),
        np.zeros(num_tokens, dtype=np.float32),
        np.full(num_tokens, -1, dtype=np.int32),
        np.zeros(num_tokens, dtype=np.int64),
        np.zeros(num_tokens, dtype=np.bool_),
        np.zeros(num_tokens, dtype=np.float64),
        experts,
    )


def _fill_span(chain: ChainArrays, span: Any, turn: Any) -> None:
    here = slice(span.start, span.start + span.length)
    source = slice(span.source_start, span.source_start + span.length)
    chain.ids[here] = ids_from_bytes(turn.sampled_ids if span.sampled else turn.suffix_ids)[source]
    chain.turn_ids[here] = span.turn_id
    is_written = span.sampled and not turn.logprobs  # by an endpoint
    chain.temperatures[here] = 1.0 if is_written else turn.temperature
    if span.sampled:
        sampled_ids = ids_from_bytes(turn.sampled_ids)
        chain.logprobs[here] = np.nan if is_written else logprobs_from_bytes(turn.logprobs)[source]
        chain.policy_steps[here] = steps_of_spans(turn.version_spans, len(sampled_ids))[source]
        chain.trained[here] = span.trained
        chain.sampled[here] = True


def _fill_experts(chain: ChainArrays, span: Any, kept_tokens: int, recorded: ExpertIds) -> None:
    """Fill in the experts of a span's tokens. A turn's first span also has those of the last token that it keeps, which
    was sampled last by its parent and first computed for this turn."""
    assert chain.experts is not None
    first = max(kept_tokens - 1, 0)
    start = first if span.start == kept_tokens else span.start
    chain.experts.fill(start, recorded[start - first : span.start + span.length - first])
