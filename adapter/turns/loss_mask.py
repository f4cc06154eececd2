"""Compute chains from a turn tree: the token sequences from the root to each leaf, and where each sampled token is
trained. A pure function.

This one decision makes sure that only sampled tokens are trained, and each of them at most once. The result is stored
as `chain` and `chain_span`.

    prompt of a turn = parent's stream[:kept_tokens] ++ suffix, stream = prompt ++ sampled ids
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from ratchet.types import ForkCause, TurnKind
from store.chains import TokenChain, TrainSpan
from store.turns import TurnMeta

Drift = Literal["branch", "drop"]
_DRIFTS = frozenset({ForkCause.DRIFT, ForkCause.THINKING})
"""The prompt has the same messages with other tokens: re-tokenised, or without thinking that the template dropped."""
TRAIN_KINDS = frozenset({TurnKind.MAIN, TurnKind.SUB_AGENT, TurnKind.COMPACTION})


def is_trainable(
    turn: TurnMeta, train_kinds: Collection[TurnKind] = TRAIN_KINDS, came_back: Collection[int] = ()
) -> bool:
    """Return whether the turn was delivered to its last byte, has all logprobs, and is of a kind that the run trains.

    `came_back`: turns whose whole answer a client sent back, which proves their delivery: an adapter that is killed
    after the last byte cannot record it. The store does not complete a turn after its session was closed, so that need
    not be checked here.
    """
    delivered = turn.delivered or turn.id in came_back
    return delivered and turn.logprobs_valid and turn.num_sampled > 0 and turn.kind in train_kinds


def build_chains(
    turns: Sequence[TurnMeta], drift: Drift = "branch", train_kinds: Collection[TurnKind] = TRAIN_KINDS
) -> list[TokenChain]:
    """All chains of one attempt, in the order of their leaves.

    `turns` are the completed ones, parents before children. A whole output is trained in the first chain that has it;
    an output that a fork cuts is context there. With `branch`, the turns behind the cut keep a chain in which they are
    whole. With `drop`, those that the drifted prompt continues are left out, unless another chain has them, too.
    """
    streams: dict[int, tuple[TrainSpan, ...]] = {}
    for turn in turns:
        streams[turn.id] = _spans_of(turn, streams)
    by_id = {turn.id: turn for turn in turns}
    came_back = _came_back(turns, by_id)
    trained: set[int] = set()
    chains = []
    for leaf in _leaves(turns, by_id, drift):
        spans = []
        for span in streams[leaf.id]:
            turn = by_id[span.turn_id]
            whole = span.sampled and span.length == turn.num_sampled
            train = whole and turn.id not in trained and is_trainable(turn, train_kinds, came_back)
            if train:
                trained.add(turn.id)
            spans.append(replace(span, trained=train))
        chains.append(TokenChain(leaf.id, tuple(spans)))
    return chains


def _came_back(turns: Sequence[TurnMeta], by_id: dict[int, TurnMeta]) -> set[int]:
    """Turns whose whole output stands in the prompt of a later turn, or whose answer does in a later history.

    The second holds also if the later turn was never completed, and if the template left thinking out of its prompt.
    """
    found = {turn.id for turn in turns if turn.came_back}
    for turn in turns:
        parent = by_id.get(turn.parent_turn_id) if turn.parent_turn_id is not None else None
        if parent is not None and turn.kept_tokens == _prompt_tokens(parent, by_id) + parent.num_sampled:
            found.add(parent.id)
    return found


def _spans_of(turn: TurnMeta, streams: dict[int, tuple[TrainSpan, ...]]) -> tuple[TrainSpan, ...]:
    """The spans of a turn's prompt and output, none of them trained; empty ones are omitted."""
    spans: list[TrainSpan] = []
    if turn.parent_turn_id is not None:
        for span in streams[turn.parent_turn_id]:
            if span.start >= turn.kept_tokens:
                break
            spans.append(replace(span, length=min(span.length, turn.kept_tokens - span.start)))
    for sampled, length in ((False, turn.num_suffix), (True, turn.num_sampled)):
        if length:
            spans.append(TrainSpan(turn.id, sampled, False, sum(one.length for one in spans), length))
    return tuple(spans)


def _leaves(turns: Sequence[TurnMeta], by_id: dict[int, TurnMeta], drift: Drift) -> list[TurnMeta]:
    """Turns whose whole stream is in no other chain; with `drop`, without those that a drifted prompt has lost."""
    inner: set[int] = set()
    for at, turn in enumerate(turns):
        ancestor = by_id.get(turn.parent_turn_id) if turn.parent_turn_id is not None else None
        if ancestor is None:
            continue
        length = _prompt_tokens(ancestor, by_id) + ancestor.num_sampled
        assert turn.kept_tokens <= length, f"turn {turn.id} keeps {turn.kept_tokens} of {length} tokens of its parent"
        if turn.kept_tokens == length:
            inner.add(ancestor.id)
        elif drift == "drop" and turn.fork_cause in _DRIFTS:
            inner.update(_lost_turns(turns[:at], turn, ancestor, by_id))
    return [turn for turn in turns if turn.id not in inner]


def _lost_turns(
    earlier: Sequence[TurnMeta], turn: TurnMeta, ancestor: TurnMeta, by_id: dict[int, TurnMeta]
) -> list[int]:
    """The turns of the stream that a drifted prompt continues, from its newest turn to the ancestor that is cut.

    It continues the newest turn of its lane that holds the ancestor's stream beyond the cut: a client sends the whole
    history, whose messages are those of that turn.
    """
    for newest in reversed(earlier):
        if newest.lane != turn.lane:
            continue
        path = [newest]
        while path[-1].id != ancestor.id and path[-1].kept_tokens > turn.kept_tokens:
            parent = by_id.get(path[-1].parent_turn_id) if path[-1].parent_turn_id is not None else None
            if parent is None:
                break
            path.append(parent)
        if path[-1].id == ancestor.id:
            return [one.id for one in path]
    return [ancestor.id]


def _prompt_tokens(turn: TurnMeta, by_id: dict[int, TurnMeta]) -> int:
    return turn.kept_tokens + turn.num_suffix if turn.parent_turn_id in by_id else turn.num_suffix
