"""The tool calls of an answer, read one after the other while its text grows.

A call is read at an end mark, from the text up to it and nothing behind it, so no later token changes it: a stream may
show it, and the stored answer has the same call. An end mark inside of an argument ends no call: there, more text would
change what the model's parser finds. Nothing is read behind a call that cannot be read or that does not fit its tool.
A call with too many end marks is read when the whole answer is known, at once with all that follows it.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

from adapter.conversation import ToolCall

_MOST_ENDS = 4
"""End marks at which one call is tried. Each costs up to two parses of all of it so far, and a model may repeat a
mark until its limit."""


class FoundCall(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> str: ...


class FoundCalls(Protocol):
    """The findings of the model's parser: `content` is the text before the calls.

    `is_closed`: text behind the parsed text is known to belong to none of the calls.
    """

    @property
    def content(self) -> str: ...

    @property
    def calls(self) -> Sequence[FoundCall]: ...

    @property
    def is_closed(self) -> bool: ...


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
        self._has_left = False

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

    def read_all(self, body: str) -> None:
        """Read the whole text, also what `read` has left."""
        self.read(body)
        if not self._has_left:
            return
        self._has_left = False
        text = body[self._begin :]
        found = self._parse(text)
        valid = self._valid(found)
        unchanged = zip(found.calls, self._parse(text + "x").calls, strict=False) if valid else ()
        num_sure = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], unchanged))
        self._add(found, valid[:num_sure])

    def _read_until(self, end: int) -> None:
        text = self._body[self._begin : end]
        found = self._parse(text)
        self._num_ends += 1
        valid = self._valid(found)
        is_whole = valid and len(valid) == len(found.calls)
        is_sure = is_whole and (found.is_closed or list(found.calls) == list(self._parse(text + "x").calls))
        if not is_sure:
            self._is_over = self._has_left = self._num_ends == _MOST_ENDS
            return
        self._begin = end
        self._num_ends = 0
        self._add(found, valid)

    def _valid(self, found: FoundCalls) -> tuple[ToolCall, ...]:
        """The calls before the first that does not fit its tool."""
        valid: list[ToolCall] = []
        for one in found.calls:
            if (call := self._checked(one)) is None:
                break
            valid.append(call)
        return tuple(valid)

    def _add(self, found: FoundCalls, calls: tuple[ToolCall, ...]) -> None:
        if calls and not self.calls:
            self.text = found.content
        self.calls += calls
        if self._most_calls is not None and len(self.calls) >= self._most_calls:
            self.calls = self.calls[: self._most_calls]
            self._is_over = True
