"""The text behind a stored stream, for templates whose histories are not the sum of their segments.

Such a template is rendered in full. Its text before the last recognised answer is not used: the stored stream stands
there, with the ids that were sampled. What follows that answer is found by two marks:

    ... answer k [nonce] closing text | boundary | next role's text ... generation prompt
    `- the stored stream -------------´           `- the tail, tokenised ----------------´

- A nonce at the answer's end, in its text or in its last tool call, shows where the answer's own text ends.
- The boundary is the first token behind it that ends an answer: a stop token of the model, which in some templates is
  the opening of the next role, or the token that the template puts behind an answer.

If the stream ends with the boundary, the tail begins behind it; after any other end the tail begins with it.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from adapter.conversation import Message, MessageRun, Preamble
from adapter.prompt.chat_template import ChatTemplate, TemplateRefusedError
from adapter.prompt.tokenizer import PolicyTokenizer
from store.arrays import Ids

_USER = Message("user", "zqxu")
_ANSWER = Message("assistant", "zqxa")


class _Boundary(NamedTuple):
    """The added token that ends an answer, and the answer's closing text before it."""

    closing: str
    alias: str


class EarlierTextChangedError(Exception):
    """Raised if the text that follows the answer changes the text before it. `drops_thinking`: the template leaves
    earlier thinking out; other templates only move their tools, for example."""

    def __init__(self, drops_thinking: bool) -> None:
        super().__init__(drops_thinking)
        self.drops_thinking = drops_thinking


class StreamTails:
    """Finds tails for one template. `boundary_ids`: the tokens that may end an answer."""

    def __init__(self, template: ChatTemplate, tokenizer: PolicyTokenizer, stop_ids: Sequence[int]) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._nonce = f"zqx{secrets.token_hex(6)}"
        self.boundary_ids = frozenset(stop_ids) | self._template_end()

    def find(self, preamble: Preamble, runs: Sequence[MessageRun], at: int, last_id: int) -> Ids | None:
        """Return the ids that follow the stream of answer runs[at], None if they cannot be separated.

        `last_id`: the stream's last. Raises EarlierTextChangedError, TemplateRefusedError.
        """
        for answer in self._marked(runs[at].messages[0]):
            marked = [*runs[:at], MessageRun.of([answer]), *runs[at + 1 :]]
            before, found, rest = self._render(preamble, marked, True).partition(self._nonce)
            if found:
                break
        if not found or self._nonce in rest or not self._render(preamble, runs, True).endswith(rest):
            return None
        try:
            alone = self._render(preamble, marked[: at + 1], False)
        except TemplateRefusedError:
            return None
        if alone.partition(self._nonce)[0] != before and not self._keeps(preamble, marked[: at + 1], before):
            answers = [run.messages[0].text.strip() for run in runs[: at + 1] if run.assistant]
            raise EarlierTextChangedError(self._template.shows_reasoning or any(text not in before for text in answers))
        boundary = self._boundary(answer, runs[at + 1].messages[0])
        if boundary is None or not rest.startswith(boundary.closing + boundary.alias):
            return None
        return self._tail_ids(rest[len(boundary.closing) :], boundary.alias, last_id)

    def _keeps(self, preamble: Preamble, answered: Sequence[MessageRun], before: str) -> bool:
        """Return whether the template shows `before` before a tool's result, which then changes nothing before it.

        An answer alone may be shown otherwise: some templates mark an empty thinking of the last message.
        """
        calls = answered[-1].messages[0].tool_calls
        results = [Message("tool", "result", tool_call_id=call.id) for call in calls] or [Message("tool", "result")]
        try:
            text = self._render(preamble, [*answered, MessageRun.of(results)], False)
        except TemplateRefusedError:
            return False
        return text.partition(self._nonce)[0] == before

    def _boundary(self, answer: Message, follower: Message) -> _Boundary | None:
        """The boundary behind an answer, found before the text of a message of the follower's role."""
        stub = replace(follower, text=_USER.text)
        try:
            text = self._template.render([_USER, answer, stub])
        except TemplateRefusedError:
            return None
        between = text.partition(self._nonce)[2].partition(stub.text)[0]
        for match in self._tokenizer.added.finditer(between):
            if self._tokenizer.id_of(match[0]) in self.boundary_ids:
                return _Boundary(between[: match.start()], match[0])
        return None

    def _tail_ids(self, text: str, alias: str, last_id: int) -> Ids | None:
        """Return the ids of `text`, which begins with a boundary, without it if the stream ends with it.

        None if the tokenizer makes other ids of the text behind the boundary alone.
        """
        ids = self._tokenizer.encode_whole(text)
        behind = self._tokenizer.encode(text[len(alias) :], at_start=False)
        if not np.array_equal(ids[1:], behind):
            return None
        return behind if int(ids[0]) == last_id else ids

    def _marked(self, message: Message) -> Iterator[Message]:
        """The answer with the nonce at its end: in its last call, or in its text if the template shows no call."""
        if message.tool_calls:
            *calls, last = message.tool_calls
            yield replace(message, tool_calls=(*calls, replace(last, arguments={**last.arguments, "zqx": self._nonce})))
        yield replace(message, text=message.text + self._nonce)

    def _render(self, preamble: Preamble, runs: Sequence[MessageRun], generation_prompt: bool) -> str:
        return self._template.render(preamble.messages(runs), preamble.tools, generation_prompt)

    def _template_end(self) -> frozenset[int]:
        """The token that the template puts behind an answer's text, if it is one."""
        try:
            text = self._template.render([_USER, _ANSWER, _USER])
        except TemplateRefusedError:
            return frozenset()
        found = self._tokenizer.added.match(text.rpartition(_ANSWER.text)[2])
        return frozenset({self._tokenizer.id_of(found[0])} if found else ())
