"""An answer while it is sampled, for clients that read a stream.

What is shown is the beginning of the answer that will be stored, so nothing is shown that a later token could change:
the beginning of what may become a mark or a stop sequence, and white space that the parsers may strip. As in the stored
answer, the text is cut at a stop sequence before it is split at marks. Tool calls follow when the answer is stored: an
agent can do nothing with a part of one. If an answer does not begin with what was shown, its streams fail, and a retry
gets the stored answer (`adapter/replies.py`).
"""

import asyncio
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from adapter.conversation import ShownText


@dataclass(frozen=True, slots=True)
class OutputMarks:
    """The marks at which an output's parsers act. `think_start` None: the model's thinking is not told from its text.

    `begins_thinking`: whether an output without a mark at its beginning is thinking; None if that depends on what
    follows. `strips_thinking`: white space at its end is left out. `tool_marks`: beginnings of tool calls; None if they
    are not known. `call_ends`: marks at which a call may end; none if all calls are read at once. `others`: marks
    behind which nothing is shown.
    """

    think_start: str | None = None
    think_end: str | None = None
    begins_thinking: bool | None = False
    strips_thinking: bool = True
    tool_marks: tuple[str, ...] | None = None
    call_ends: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


class _Matcher(NamedTuple):
    """Finds marks and stop sequences, which are `names`, sorted. `longest`: characters of the longest beginning of one.

    The beginnings are not kept: those of the stop sequences that a request may have would take 100 MB.
    """

    mark: re.Pattern[str]
    names: tuple[str, ...]
    longest: int

    def num_open(self, text: str) -> int:
        """Length of the longest end of the text that may be the beginning of a longer name."""
        for length in range(min(self.longest, len(text)), 0, -1):
            end = text[-length:]
            at = bisect_right(self.names, end)  # names that begin with it follow it
            if at < len(self.names) and self.names[at].startswith(end):
                return length
        return 0


@lru_cache(maxsize=32)
def _matcher(known: tuple[str, ...]) -> _Matcher:
    names = sorted(filter(None, set(known)), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
    return _Matcher(pattern, tuple(sorted(names)), max(map(len, names), default=1) - 1)


class _Part(StrEnum):
    START = "start"  # it is not known yet whether the output begins with thinking
    UNDECIDED = "undecided"  # it is thinking if the mark of its end follows
    THINKING = "thinking"
    TEXT = "text"
    REST = "rest"  # not shown before the answer is known


class LiveAnswer:
    """A growing answer. `thinking` and `text` have what is certain of it; they only grow."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        marks: OutputMarks,
        stop_sequences: Sequence[str],
        has_tools: bool,
    ) -> None:
        self.thinking = ""
        self.text = ""
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._marks = marks
        self._strips = has_tools  # text is stripped if a tool call follows it
        self._stops = _matcher(tuple(stop_sequences))
        thinks = (marks.think_start or "", marks.think_end or "")
        self._matcher = _matcher((*marks.others, *(marks.tool_marks or ()), *thinks))
        self._changed: asyncio.Future[None] | None = None
        self._forget()

    def _forget(self) -> None:
        """Set what the tokens so far have changed to its beginning."""
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._part = self._text_part() if self._marks.think_start is None else _Part.START
        self._open_stop = ""  # decoded text that may be the beginning of a stop sequence
        self._hidden = ""  # text of the answer that is not shown
        self._num_searched = 0  # characters of it in which no mark was found
        self._has_stopped = False

    def changed(self) -> "asyncio.Future[None]":
        """A future that is done when more may be shown."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    @property
    def released(self) -> ShownText:
        """The part of the answer that streams may have written by now."""
        return ShownText(self.thinking, self.text)

    def begin_again(self) -> bool:
        """Forget the tokens so far, if nothing of them may have been shown; return whether."""
        if any(self.released):
            return False
        self._forget()
        return True

    def feed(self, ids: Sequence[int]) -> None:
        """Take sampled ids. Nothing is shown of what follows a stop id or a stop sequence, also if it comes later."""
        if self._part is _Part.REST or self._has_stopped:
            return
        before = sum(map(len, self.released))
        self._decode(ids)
        while self._advance():
            pass
        if sum(map(len, self.released)) > before and self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    def _decode(self, ids: Sequence[int]) -> None:
        pieces = [self._open_stop]
        for one in ids:
            if one in self._stop_ids:
                self._has_stopped = True
                break
            try:
                pieces.append(self._decoder.step(self._tokenizer, one) or "")
            except Exception:  # of the library's own class: bytes that are no text
                self._part = _Part.REST
                break
        text = "".join(pieces)
        found = self._stops.mark.search(text)
        self._has_stopped = self._has_stopped or found is not None
        end = len(text) - self._stops.num_open(text)
        end = end if found is None else min(end, found.start())
        self._hidden += text[:end]
        self._open_stop = text[end:]

    def _text_part(self) -> _Part:
        return _Part.REST if self._strips and self._marks.tool_marks is None else _Part.TEXT

    def _advance(self) -> bool:
        """Show what is certain of the hidden text; return whether another part has begun."""
        if self._part is _Part.REST:
            return False
        # What was searched before has no mark, but one may have begun in its end.
        found = self._matcher.mark.search(self._hidden, max(0, self._num_searched - self._matcher.longest))
        end = len(self._hidden) - self._matcher.num_open(self._hidden)
        if found is not None and end < found.start():
            found = None  # it may be a part of a longer mark
        end = end if found is None else found.start()
        self._num_searched = 0 if found is not None else len(self._hidden)
        certain = self._hidden[:end]
        if self._part is _Part.START:
            return self._begin(certain, found)
        if self._part is _Part.UNDECIDED:
            if found is None:
                return False
            self._part = _Part.THINKING if found.group() == self._marks.think_end else _Part.REST
            return True
        certain_text = certain.rstrip()
        if self._is_stripped(certain_text):
            self._part = _Part.REST
            return False
        self._add(certain_text)
        space = certain[len(certain_text) :]
        self._hidden = self._hidden[len(certain_text) :]
        if found is None:
            self._num_searched -= len(certain_text)
            return False
        if self._part is _Part.THINKING and found.group() == self._marks.think_end:
            self.thinking += "" if self._marks.strips_thinking else space.rstrip("\n")
            self._part = self._text_part()
            self._hidden = found.string[found.end() :].lstrip("\n")
            return True
        self._part = _Part.REST
        return False

    def _begin(self, certain: str, found: "re.Match[str] | None") -> bool:
        if not certain.strip() and found is None:
            return False
        if not certain.strip() and found is not None and found.group() == self._marks.think_start:
            # Some parsers keep a space before the mark as thinking, others do not.
            self._part = _Part.REST if certain.strip("\n") else _Part.THINKING
            self._hidden = self._hidden[found.end() :]
        else:
            thinks = self._marks.begins_thinking
            self._part = _Part.UNDECIDED if thinks is None else _Part.THINKING if thinks else self._text_part()
        return True

    def _is_stripped(self, text: str) -> bool:
        """Return whether this beginning of the text has white space that is left out if a tool call follows."""
        if self._part is not _Part.TEXT or self.text or not self._strips:
            return False
        return self._without_newlines(text)[:1].isspace()

    def _without_newlines(self, text: str) -> str:
        return text if self._marks.think_start is None else text.lstrip("\n")

    def _add(self, text: str) -> None:
        """Show a text without white space at its end."""
        if self._part is _Part.THINKING:
            self.thinking += text if self.thinking else text.lstrip("\n")
        else:
            self.text += text if self.text else self._without_newlines(text)
