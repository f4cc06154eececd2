"""The tool calls of an answer, read one after the other while its text grows.

A call is read at an end mark, from the text up to it and nothing behind it, so no later token changes it: a stream may
show it, and the stored answer has the same call. An end mark inside of an argument ends no call: there, more text would
change what the model's parser finds. Nothing is read behind a call that cannot be read or that does not fit its tool.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from adapter.conversation import ToolCall

_MOST_ENDS = 16
"""End marks that one call may have in its arguments; each is parsed with all before it."""


class FoundCall(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> str: ...


class FoundCalls(Protocol):
    """What the model's parser finds: `content` is the text before the calls."""

    @property
    def content(self) -> str: ...

    @property
    def calls(self) -> Sequence[FoundCall]: ...


class CallReader:
    """`text`: what precedes the first call. `parse`: the model's parser of a text without thinking. `checked`: a found
    call as the client gets it, None if it does not fit its tool. `most_calls`: None for any number.
    """

    def __init__(
        self,
        call_ends: Sequence[str],
        parse: Callable[[str], FoundCalls],
        checked: Callable[[FoundCall], ToolCall | None],
        most_calls: int | None,
    ) -> None:
        self._call_ends = call_ends
        self._parse = parse
        self._checked = checked
        self._most_calls = most_calls
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what was read."""
        self.text = ""
        self.calls: tuple[ToolCall, ...] = ()
        self._body = ""
        self._begin = 0  # of the text behind the last call that was read
        self._searched = 0
        self._num_ends = 0  # in the text behind the last call
        self._is_over = False

    def has_read_a_beginning_of(self, body: str) -> bool:
        return body.startswith(self._body)

    def num_unread(self, body: str) -> int:
        """Characters that the parser would get."""
        return len(body) - self._begin

    def read(self, body: str) -> None:
        """Read the calls of a text that begins with the text of the last time."""
        self._body = body
        while not self._is_over:
            ends = [at + len(mark) for mark in self._call_ends if (at := body.find(mark, self._searched)) >= 0]
            if not ends:
                return
            self._searched = min(ends)
            self._read_until(self._searched)

    def _read_until(self, end: int) -> None:
        text = self._body[self._begin : end]
        found = self._parse(text)
        self._num_ends += 1
        calls = [self._checked(one) for one in found.calls]
        valid = tuple(one for one in calls if one is not None)
        is_whole = valid and len(valid) == len(calls) and list(found.calls) == list(self._parse(text + "x").calls)
        if not is_whole:
            self._is_over = self._num_ends == _MOST_ENDS
            return
        if not self.calls:
            self.text = found.content
        self.calls += valid
        self._begin = end
        self._num_ends = 0
        if self._most_calls is not None and len(self.calls) >= self._most_calls:
            self.calls = self.calls[: self._most_calls]
            self._is_over = True
