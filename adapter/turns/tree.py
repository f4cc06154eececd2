"""The turn tree of one session, in memory: which stored stream a request continues, and where it leaves it.

Why here: attaching is a question of token ids and message keys only; it knows neither HTTP nor SQL.
Called by: `prompts.py` and `capture.py`, on the event loop. Rebuilt from the store by any process at any time.

A turn's stream is a piece of a buffer that all turns share which extend each other (`streams.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from adapter.conversation import Message, MessageRun, extend_key
from adapter.prompt.token_buffer import TokenBuffer, TokenStream
from ratchet.store.arrays import Ids
from ratchet.types import TurnKind


class TreeNode(msgspec.Struct, gc=False):
    """A completed turn, of no interest to the garbage collector: a collection must not take longer the more turns there are.

    `stream`: its prompt and output. `ended`: with the template's own end. `thinks`: an answer in it shows thinking, which a later
    question may drop.
    """

    turn_id: int
    parent_id: int | None
    kept_tokens: int
    prompt_tokens: int
    stream: TokenStream
    ended: bool
    thinks: bool
    lane: str
    kind: TurnKind
    children: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.stream.length


@dataclass(frozen=True, slots=True)
class AttachPoint:
    """Where a prompt joins the tree: `kept_tokens` of the parent's stream stand, what follows them in the prompt is new."""

    parent_turn_id: int | None
    kept_tokens: int


@dataclass(frozen=True, slots=True)
class TurnGrowth:
    """What a completed turn adds beside its tokens: the keys of its request's histories, and its answer."""

    keys: Sequence[bytes]
    answer: Message
    lane: str
    kind: TurnKind
    ended: bool
    thinks: bool


@dataclass(slots=True)
class TurnTree:
    nodes: dict[int, TreeNode] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)
    """Keys of all histories that were ever asked with or answered."""
    last_answers: dict[str, tuple[TurnKind, str]] = field(default_factory=dict)
    """Per lane, the kind and the text of the newest turn's answer."""
    _buffers: dict[TokenBuffer, int] = field(default_factory=dict)
    """In the order of their first turns, each with the length of its longest turn: what follows that is a prompt in flight."""
    _after: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    _loose: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    _anywhere: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Turns by key. Tuples of numbers, unlike lists, cost the garbage collector nothing."""

    def stream(self, turn_id: int) -> Ids:
        return self.nodes[turn_id].stream.ids

    def sampled(self, turn_id: int) -> Ids:
        return self.stream(turn_id)[self.nodes[turn_id].prompt_tokens :]

    def prompt(self, join: AttachPoint, suffix: Ids) -> TokenStream:
        """The stream of a prompt that joins the tree there and goes on with `suffix`."""
        if join.parent_turn_id is None:
            return TokenStream.of(suffix)
        return self.nodes[join.parent_turn_id].stream.cut(join.kept_tokens).extended(suffix)

    # ------------------------------------------------------------ reading

    def newest(self, units: Sequence[MessageRun], keys: Sequence[bytes], lane: str) -> tuple[int, int] | None:
        """(turn, place in `units` of its answer) of the last stored turn whose request and answer begin this history."""
        for at in range(len(units) - 1, -1, -1):
            if units[at].assistant and (turn_id := self.answered(keys[at], units[at], lane)) is not None:
                return turn_id, at
        return None

    def answered(self, key: bytes, unit: MessageRun, lane: str) -> int | None:
        """The turn that gave this answer to the history `key`: strictly equal, or the only one that is loosely equal."""
        found = self._after.get(extend_key(key, unit.key))
        if found:
            return self._nearest(found, lane)
        loose = self._loose.get(extend_key(key, unit.loose_key), ())
        return loose[0] if len(loose) == 1 else None

    def answers_like(self, key: bytes, unit: MessageRun) -> bool:
        """Whether the history `key` was ever answered with about this."""
        return bool(self._loose.get(extend_key(key, unit.loose_key)))

    def elsewhere(self, unit: MessageRun, lane: str) -> int | None:
        """The newest turn of the session that gave exactly this answer, tool-call ids included, whatever it was asked."""
        found = self._anywhere.get(unit.key)
        return self._nearest(found, lane) if found else None

    def _nearest(self, found: Sequence[int], lane: str) -> int:
        same_lane = [turn_id for turn_id in found if self.nodes[turn_id].lane == lane]
        return (same_lane or found)[-1]

    def join(self, ids: Ids, base: int | None) -> AttachPoint:
        """Attaches a prompt to the stored stream with which it shares most tokens, the first of them if several do.

        `base`: a turn whose stream is known to begin it; then only what was asked after that turn is compared.
        """
        if base is not None:
            return self._below(ids, base)
        kept, owner = 0, None
        for one, length in self._buffers.items():
            common = common_prefix(ids, one.first(length))
            if common > kept:
                kept, owner = common, one
        if owner is None:
            return AttachPoint(None, 0)
        node = min(
            (one for one in self.nodes.values() if one.stream.buffer is owner and one.length >= kept),
            key=lambda one: one.turn_id,
        )
        return AttachPoint(node.turn_id, kept)

    def ends_at(self, join: AttachPoint) -> bool:
        """Whether the prompt goes on from its parent's whole stream, and no other turn does."""
        if join.parent_turn_id is None:
            return False
        parent = self.nodes[join.parent_turn_id]
        return join.kept_tokens == parent.length and all(
            self.nodes[one].kept_tokens < parent.length for one in parent.children
        )

    def _below(self, ids: Ids, base: int) -> AttachPoint:
        kept, parent, waiting = self.nodes[base].length, base, list(self.nodes[base].children)
        while waiting:
            node = self.nodes[waiting.pop(0)]
            if node.kept_tokens != kept:
                continue  # it leaves the stream elsewhere, so it shares no more of it
            common = kept + common_prefix(ids[kept:], self.stream(node.turn_id)[kept:])
            if common > kept:
                kept, parent, waiting = common, node.turn_id, list(node.children)
        return AttachPoint(parent, kept)

    # ------------------------------------------------------------ growing

    def add(self, turn_id: int, join: AttachPoint, prompt: TokenStream, sampled: Ids, grown: TurnGrowth) -> None:
        """Adds a completed turn."""
        if turn_id in self.nodes:
            return
        stream = prompt.extended(sampled)
        self.nodes[turn_id] = TreeNode(
            turn_id,
            join.parent_turn_id,
            join.kept_tokens,
            prompt.length,
            stream,
            grown.ended,
            grown.thinks,
            grown.lane,
            grown.kind,
        )
        self._buffers[stream.buffer] = max(stream.length, self._buffers.get(stream.buffer, 0))
        if join.parent_turn_id is not None:
            self.nodes[join.parent_turn_id].children += (turn_id,)
        self._know(turn_id, grown)

    def _know(self, turn_id: int, grown: TurnGrowth) -> None:
        unit, request = MessageRun.of([grown.answer]), grown.keys[-1]
        self.seen.update(grown.keys)
        self.seen.add(extend_key(request, unit.key))
        self.last_answers[grown.lane] = (grown.kind, grown.answer.text)
        for known, key in (
            (self._after, extend_key(request, unit.key)),
            (self._loose, extend_key(request, unit.loose_key)),
            (self._anywhere, unit.key),
        ):
            known[key] = (*known.get(key, ()), turn_id)

    def known(self) -> Iterable[int]:
        return self.nodes.keys()

    @property
    def num_turns(self) -> int:
        return len(self.nodes)

    @property
    def num_bytes(self) -> int:
        """Of the token buffers, by far the most of what a session holds."""
        return 4 * sum(self._buffers.values())


def common_prefix(one: Ids, other: Ids) -> int:
    """Length of the longest common prefix; equal blocks are compared as memory."""
    limit = min(len(one), len(other))
    if np.array_equal(one[:limit], other[:limit]):
        return limit
    return int(np.argmax(one[:limit] != other[:limit]))
