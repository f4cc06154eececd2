"""The turn tree of one session, in memory: which stored stream a request continues, and where it leaves it.

Attaching a prompt needs token ids and message keys only, so this file knows neither HTTP nor SQL; any process can
rebuild the tree from the store at any time. Turns that extend each other share one buffer (`token_buffer.py`). Changed
on the event loop only; `PromptBuilder` also reads it in threads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from adapter.conversation import Message, MessageRun, extend_key
from adapter.prompt.token_buffer import TokenBuffer, TokenStream
from adapter.turns.reasoning_index import ReasoningIndex
from ratchet.types import TurnKind
from store.arrays import Ids


class TreeNode(msgspec.Struct, gc=False):
    """A completed turn.

    Not tracked by the garbage collector, so that a collection does not take longer the more turns there are.

    `stream`: prompt and output. `ended`: the output ends with the template's end token. `thinks`: an answer in the
    stream shows thinking, which a later question may make the template drop.
    """

    turn_id: int
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

    @property
    def has_answer(self) -> bool:
        """False if the stream is the prompt alone, or empty: an endpoint's answer may have no tokens."""
        return self.length > self.prompt_tokens


@dataclass(frozen=True, slots=True)
class AttachPoint:
    """A prompt's place in the tree: it begins with the first `kept_tokens` of the parent's stream, the rest is new."""

    parent_turn_id: int | None
    kept_tokens: int


class StoredAnswer(NamedTuple):
    """The turn that gave an answer of a history, and the answer's index among the history's runs."""

    turn_id: int
    run_index: int


@dataclass(frozen=True, slots=True)
class TurnGrowth:
    """The additions of a completed turn to the tree, beside its tokens.

    `keys`: keys of the histories in its request; the last is the request's own. `loose_key`: in a chain of loose keys.
    """

    keys: Sequence[bytes]
    answer: Message
    lane: str
    kind: TurnKind
    ended: bool
    thinks: bool
    loose_key: bytes


@dataclass(slots=True)
class TurnTree:
    """`follows_loose_chains`: recognise answers in histories whose answers are all only loosely equal, as of a client
    that makes new ids of tool calls for each request. Not if the template shows the ids."""

    follows_loose_chains: bool = True
    nodes: dict[int, TreeNode] = field(default_factory=dict)
    known_keys: set[bytes] = field(default_factory=set)
    """Keys of all histories that were requested or answered."""
    last_answers: dict[str, tuple[TurnKind, str]] = field(default_factory=dict)
    """Per lane, the kind of the newest turn and the text of its answer."""
    reasoning: ReasoningIndex = field(default_factory=ReasoningIndex)
    _buffers: dict[TokenBuffer, int] = field(default_factory=dict)
    """Buffers in the order of their first turns, each with the number of tokens that turns use; further tokens belong
    to a prompt in flight."""
    _by_history: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    _by_loose_history: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    _by_loose_chain: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    _by_answer: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Turns by key of history and answer, of which one or both are loose, or of the answer alone.

    The garbage collector does not visit tuples of numbers.
    """

    def stream(self, turn_id: int) -> Ids:
        return self.nodes[turn_id].stream.ids

    def sampled(self, turn_id: int) -> Ids:
        return self.stream(turn_id)[self.nodes[turn_id].prompt_tokens :]

    def prompt(self, attach_point: AttachPoint, suffix: Ids) -> TokenStream:
        """The stream of a prompt that attaches there and continues with `suffix`."""
        if attach_point.parent_turn_id is None:
            return TokenStream.of(suffix)
        return self.nodes[attach_point.parent_turn_id].stream.cut(attach_point.kept_tokens).extended(suffix)

    def newest_answer(
        self, runs: Sequence[MessageRun], keys: Sequence[bytes], loose_keys: Sequence[bytes], lane: str
    ) -> StoredAnswer | None:
        """The last answer among these runs (the parsed part of a history) that a stored turn gave to the history before
        it, strictly or loosely equal."""
        for at in range(len(runs) - 1, -1, -1):
            if not runs[at].assistant:
                continue
            if (turn_id := self.turn_of_answer(keys[at], runs[at], lane, loose_keys[at])) is not None:
                return StoredAnswer(turn_id, at)
        return None

    def turn_of_answer(self, key: bytes, run: MessageRun, lane: str, loose_key: bytes | None = None) -> int | None:
        """The turn that gave this answer to the history `key`: strictly equal, else the only loosely equal one.

        If there is none, the only one that gave a loosely equal answer to a history with the key `loose_key`.
        """
        found = self._by_history.get(extend_key(key, run.key))
        if found:
            return self._newest(found, lane)
        loose = self._by_loose_history.get(extend_key(key, run.loose_key), ())
        if not loose and loose_key is not None and self.follows_loose_chains:
            loose = self._by_loose_chain.get(extend_key(loose_key, run.loose_key), ())
        return loose[0] if len(loose) == 1 else None

    def with_reasoning(self, key: bytes, run: MessageRun, loose_key: bytes | None = None) -> MessageRun:
        """The answer with the reasoning that its client omitted, if exactly one stored answer is meant.

        `key`, `loose_key`: of the history before it. An answer that was sampled without reasoning is left as it is.
        """
        reasoning = self.reasoning.find(key, run, loose_key if self.follows_loose_chains else None)
        if not reasoning or extend_key(key, run.key) in self._by_history:
            return run
        return run.with_reasoning(reasoning)

    def knows(self, key: bytes, run: MessageRun, loose_key: bytes) -> bool:
        """Return whether an answer is a stored one, perhaps without its reasoning. Keys as in `with_reasoning`."""
        if self.turn_of_answer(key, run, "", loose_key) is not None or run.key in self._by_answer:
            return True
        reasoning = self.reasoning.find(key, run, loose_key if self.follows_loose_chains else None)
        return bool(reasoning) and self.reasoning.has_text_of(run)

    def has_similar_answer(self, key: bytes, run: MessageRun) -> bool:
        """Return whether a loosely equal answer was given to the history `key`."""
        return bool(self._by_loose_history.get(extend_key(key, run.loose_key)))

    def turn_of_equal_answer(self, run: MessageRun, lane: str) -> int | None:
        """The newest turn of the session that gave exactly this answer to any history, tool-call ids included."""
        found = self._by_answer.get(run.key)
        return self._newest(found, lane) if found else None

    def _newest(self, turn_ids: Sequence[int], lane: str) -> int:
        """Return the last turn of the lane, or of all if none is of the lane."""
        same_lane = [turn_id for turn_id in turn_ids if self.nodes[turn_id].lane == lane]
        return (same_lane or turn_ids)[-1]

    def attach(self, ids: Ids, base: int | None) -> AttachPoint:
        """Attach a prompt to the stored stream with which it shares the most tokens; of several, the first.

        `base`: a turn whose whole stream the prompt is known to begin with. Only its descendants are compared then.
        """
        if base is not None:
            return self._attach_below(ids, base)
        kept = 0
        shared: TokenBuffer | None = None
        for buffer, length in self._buffers.items():
            common = common_prefix(ids, buffer.first(length))
            if common > kept:
                kept = common
                shared = buffer
        if shared is None:
            return AttachPoint(None, 0)
        node = min(
            (one for one in self.nodes.values() if one.stream.buffer is shared and one.length >= kept),
            key=lambda one: one.turn_id,
        )
        return AttachPoint(node.turn_id, kept)

    def is_free_end(self, attach_point: AttachPoint) -> bool:
        """Return whether the prompt keeps its parent's whole stream, and no turn of the tree does."""
        if attach_point.parent_turn_id is None:
            return False
        parent = self.nodes[attach_point.parent_turn_id]
        return attach_point.kept_tokens == parent.length and all(
            self.nodes[one].kept_tokens < parent.length for one in parent.children
        )

    def _attach_below(self, ids: Ids, base: int) -> AttachPoint:
        parent = base
        kept = self.nodes[base].length
        candidates = list(self.nodes[base].children)
        while candidates:
            node = self.nodes[candidates.pop(0)]
            if node.kept_tokens != kept:
                continue  # it leaves the stream elsewhere, so it shares no more of it
            common = kept + common_prefix(ids[kept:], self.stream(node.turn_id)[kept:])
            if common > kept:
                parent = node.turn_id
                kept = common
                candidates = list(node.children)
        return AttachPoint(parent, kept)

    def add(
        self, turn_id: int, attach_point: AttachPoint, prompt: TokenStream, sampled: Ids, growth: TurnGrowth
    ) -> None:
        """Add a completed turn. A turn that is there already is left as it is."""
        if turn_id in self.nodes:
            return
        stream = prompt.extended(sampled)
        self.nodes[turn_id] = TreeNode(
            turn_id,
            attach_point.kept_tokens,
            prompt.length,
            stream,
            growth.ended,
            growth.thinks,
            growth.lane,
            growth.kind,
        )
        self._buffers[stream.buffer] = max(stream.length, self._buffers.get(stream.buffer, 0))
        if attach_point.parent_turn_id is not None:
            self.nodes[attach_point.parent_turn_id].children += (turn_id,)
        self._index(turn_id, growth)

    def _index(self, turn_id: int, growth: TurnGrowth) -> None:
        self.known_keys.update(growth.keys)
        self.last_answers[growth.lane] = (growth.kind, growth.answer.text)
        self._index_answer(turn_id, growth.keys[-1], growth.answer, growth.loose_key)

    def add_view(self, turn_id: int, request_key: bytes, view: Message, loose_key: bytes | None = None) -> None:
        """Recognise another message that the tokens of a turn make, or the same behind another history.

        The first is for a retry with other options, the second for a replay.
        """
        if turn_id not in self._by_history.get(extend_key(request_key, MessageRun.of([view]).key), ()):
            self._index_answer(turn_id, request_key, view, loose_key)

    def _index_answer(self, turn_id: int, request_key: bytes, message: Message, loose_key: bytes | None) -> None:
        self.reasoning.add(turn_id, request_key, message, loose_key)
        answer = MessageRun.of([message])
        if loose_key is not None:
            key = extend_key(loose_key, answer.loose_key)
            known = self._by_loose_chain.get(key, ())
            self._by_loose_chain[key] = known if turn_id in known else (*known, turn_id)
        self.known_keys.add(extend_key(request_key, answer.key))
        for index, key in (
            (self._by_history, extend_key(request_key, answer.key)),
            (self._by_loose_history, extend_key(request_key, answer.loose_key)),
            (self._by_answer, answer.key),
        ):
            index[key] = (*index.get(key, ()), turn_id)

    def turn_ids(self) -> Iterable[int]:
        return self.nodes.keys()

    @property
    def num_turns(self) -> int:
        return len(self.nodes)


def common_prefix(one: Ids, other: Ids) -> int:
    """Length of the longest common prefix. The case of equal arrays is one comparison of memory."""
    limit = min(len(one), len(other))
    if np.array_equal(one[:limit], other[:limit]):
        return limit
    return int(np.argmax(one[:limit] != other[:limit]))
