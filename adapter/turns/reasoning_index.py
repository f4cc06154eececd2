"""The reasoning of stored answers, found by what a client that omits reasoning sends of them.

Some agents send an answer back without its reasoning. If the template shows reasoning, the prompt would then differ
from the stored stream at every answer, and each turn would fork. The reasoning is known here, so it can be put back.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from adapter.conversation import Message, MessageRun, extend_key


class _KnownAnswer(NamedTuple):
    reasoning: str
    text: str

    def is_omitted_in(self, text: str) -> bool:
        """Return whether a client's text of the answer has no more of the reasoning than the answer's own text."""
        return bool(self.reasoning) and text.count(self.reasoning) <= self.text.count(self.reasoning)


@dataclass(slots=True)
class ReasoningIndex:
    """Stored answers by the id of their first tool call; those with reasoning also by their keys without it.

    Tool-call ids are made here and are unique, so a known id alone says which answer came back, even if the client has
    rewritten its text, split its calls or merged it with another. The reasoning stands before the first call, so
    the id of the first call stands for it, and a split answer has it once.
    """

    _reasoning: dict[int, str] = field(default_factory=dict)
    _by_visible: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    _by_first_call: dict[str, "_KnownAnswer"] = field(default_factory=dict)
    _calls: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, turn_id: int, request_key: bytes, answer: Message, loose_request_key: bytes | None = None) -> None:
        """Add the answer that a turn gave to the history `request_key`."""
        ids = tuple(call.id for call in answer.tool_calls)
        self._calls |= dict.fromkeys(ids, ids)
        if ids:
            self._by_first_call[ids[0]] = _KnownAnswer(answer.reasoning, answer.text)
        if not answer.reasoning:
            return
        self._reasoning[turn_id] = answer.reasoning
        visible = MessageRun.of([replace(answer, reasoning="")])
        keys = {visible.key, extend_key(request_key, visible.key), extend_key(request_key, visible.loose_key)}
        if loose_request_key is not None:
            keys.add(extend_key(loose_request_key, visible.loose_key))
        for key in keys:
            self._by_visible[key] = (*self._by_visible.get(key, ()), turn_id)

    def find(self, history_key: bytes, run: MessageRun, loose_history_key: bytes | None = None) -> str:
        """The reasoning of an answer that came back without it, "" if there is none or if it is not certain which.

        Looked up by its tool-call ids. If none is known, as an answer to exactly this history, then to a loosely equal
        one, else by its text alone.
        """
        if not self._reasoning or not run.assistant or run.messages[0].reasoning:
            return ""
        if any(one in self._calls for one in run.call_ids):
            return "\n".join(one.reasoning for one in self._called_by(run) if one.is_omitted_in(run.messages[0].text))
        keys = [extend_key(history_key, run.key), extend_key(history_key, run.loose_key), run.key]
        if loose_history_key is not None:
            keys.insert(2, extend_key(loose_history_key, run.loose_key))
        for key in keys:
            found = {self._reasoning[turn_id] for turn_id in self._by_visible.get(key, ())}
            if found:
                return found.pop() if len(found) == 1 else ""
        return ""

    def has_text_of(self, run: MessageRun) -> bool:
        """Return whether an answer that `find` found has the text of the stored one, and so not its thinking."""
        return not run.call_ids or [one.text.strip() for one in self._called_by(run)] == [run.messages[0].text.strip()]

    def _called_by(self, run: MessageRun) -> list[_KnownAnswer]:
        """The stored answers whose first calls are in the run."""
        return [self._by_first_call[one] for one in run.call_ids if one in self._by_first_call]

    def calls_of(self, call_id: str) -> tuple[str, ...]:
        """Ids of all calls of the stored answer that made this one; empty if no stored answer did."""
        return self._calls.get(call_id, ())

    def knows(self, history_key: bytes, run: MessageRun) -> bool:
        """Return whether an answer with reasoning that is otherwise loosely equal was given to this history."""
        return extend_key(history_key, run.loose_key) in self._by_visible
