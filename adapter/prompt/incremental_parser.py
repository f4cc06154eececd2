"""Parse only what is new in a request's body.

Clients send their whole history with every call; parsing all of it would cost more than everything else in a turn.

    body   {"model":…, "messages":[ m1, m2, m3, m4, m5 ], "system":…, "tools":[…]}
           `- same bytes as in an earlier body -----´ `--- parsed ---´

A mark is the place in an earlier body where a run of messages ended, with the digest of all bytes before it. If a new
body has the same bytes up to a mark, it has the same content up to there, and parsing starts behind it. In all other
cases the whole body is parsed, so marks change the cost and never the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from adapter.conversation import Preamble
from adapter.dialects.base import Dialect, Fields
from adapter.prompt.preamble_cache import PreambleCache
from adapter.prompt.request_parser import (
    DecodedBody,
    HistoryPrefix,
    HistoryRepairs,
    ParsedRequest,
    decode_body,
    group_by_side,
    parse_request,
)

_MAX_MARKS = 6
_MAX_CONVERSATIONS = 8
_WINDOW_BYTES = 64


class _Mark(msgspec.Struct, frozen=True, gc=False):
    """The end of a run in a body: its offset, the digest of all bytes before it. `is_answer`: an assistant's run."""

    end: int
    digest: bytes
    prefix: HistoryPrefix
    is_answer: bool


class _Conversation(msgspec.Struct, gc=False):
    """The last request of one conversation.

    `earlier_fields` stand before its messages. `window`: the bytes before its first mark. `num_behind`: bytes behind
    its last mark, often system text and tools; `behind`: their digest.
    """

    earlier_fields: Fields
    preamble: Preamble
    marks: list[_Mark]
    window: bytes = b""
    num_behind: int = 0
    behind: bytes = b""


@dataclass(frozen=True, slots=True)
class _Match:
    """A mark up to which a body is known. `digest` covers the bytes before the mark."""

    conversation: _Conversation
    mark: _Mark
    digest: xxhash.xxh3_128


class IncrementalParser:
    """One session's parser. `preambles` is shared by all sessions of the process."""

    def __init__(self, preambles: PreambleCache, repairs: HistoryRepairs | None = None) -> None:
        self._preambles = preambles
        self._repairs = repairs or HistoryRepairs()
        self._conversations: list[_Conversation] = []

    def num_new_bytes(self, body: bytes) -> int:
        """Return how many bytes `parse` has to parse; equal fields behind the messages are only compared."""
        match = self._longest_match(body)
        if match is None:
            return len(body)
        num_new = len(body) - match.mark.end
        num_behind = match.conversation.num_behind
        is_known = num_behind < num_new and _digest_of_end(body, num_behind) == match.conversation.behind
        return num_new - num_behind if is_known else num_new

    def parse(self, body: bytes, dialect: Dialect, headers: Mapping[str, str], whole: bool = False) -> ParsedRequest:
        """Parse from the furthest known mark on, or all of it if `whole`. Raises InvalidRequestError."""
        request = None if whole else self.parse_new(body, dialect, headers)
        return request or self._parse_whole(body, dialect, headers)

    def parse_new(self, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> ParsedRequest | None:
        """Parse a request from the furthest known mark on; return None if it has to be parsed as a whole."""
        match = self._longest_match(body)
        return None if match is None else self._parse_from(match, body, dialect, headers)

    def _parse_whole(self, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> ParsedRequest:
        decoded = decode_body(body, dialect)
        preamble = self._preambles.get(dialect, decoded.fields)
        groups = group_by_side(decoded.items, dialect, self._repairs)
        request = parse_request(
            decoded, groups, preamble, HistoryPrefix(0, 0, preamble.key, preamble.key), dialect, headers, self._repairs
        )
        first = _offset_in(body, decoded.items[0])
        marks = _new_marks(body, body, groups, request, 0, xxhash.xxh3_128(), 0)
        if first is not None and marks:
            # Copied, because a slice would keep the whole body in memory.
            earlier = {
                name: msgspec.Raw(bytes(raw))
                for name, raw in decoded.fields.items()
                if name != dialect.history and (offset := _offset_in(body, raw)) is not None and offset < first
            }
            self._remember(body, _Conversation(earlier, preamble, marks), None)
        return request

    def _parse_from(
        self, match: _Match, body: bytes, dialect: Dialect, headers: Mapping[str, str]
    ) -> ParsedRequest | None:
        """Parse what follows a mark.

        Returns None if the preamble behind the messages has changed, or the run or answer before the mark goes on.
        """
        mark = match.mark
        rest = b'{"' + dialect.history.encode() + b'":[' + body[mark.end + 1 :]
        new = decode_body(rest, dialect)
        decoded = DecodedBody(match.conversation.earlier_fields | new.fields, new.items)
        preamble = self._preambles.get(dialect, decoded.fields)
        if preamble.key != match.conversation.preamble.key or dialect.is_answer(decoded.items[0]) == mark.is_answer:
            return None
        if self._continues_answer(decoded.items[0], dialect):
            return None
        groups = group_by_side(decoded.items, dialect, self._repairs)
        request = parse_request(decoded, groups, preamble, mark.prefix, dialect, headers, self._repairs)
        marks = [one for one in match.conversation.marks if one.end <= mark.end]
        marks += _new_marks(body, rest, groups, request, mark.prefix.num_items, match.digest, mark.end)
        conversation = _Conversation(match.conversation.earlier_fields, preamble, marks[-_MAX_MARKS:])
        self._remember(body, conversation, match.conversation)
        return request

    def _continues_answer(self, item: msgspec.Raw, dialect: Dialect) -> bool:
        """Return whether an item makes a later call of a stored answer, whose first call may stand before the mark."""
        made = dialect.call_ids(item).made if self._repairs.calls_of is not None else ()
        known = tuple(self._repairs.calls_of(made[0])) if made and self._repairs.calls_of is not None else ()
        return bool(known) and made[0] != known[0]

    def _longest_match(self, body: bytes) -> _Match | None:
        """Return the furthest known mark of the body that more messages follow."""
        best: _Match | None = None
        view = memoryview(body)
        for conversation in self._conversations:
            if _window(body, conversation.marks[0]) != conversation.window:
                continue
            digest = xxhash.xxh3_128()
            at = 0
            for mark in conversation.marks:
                digest.update(view[at : mark.end])
                at = mark.end
                if digest.digest() != mark.digest:
                    break
                if (best is None or at > best.mark.end) and body[at : at + 1] == b",":
                    best = _Match(conversation, mark, digest.copy())
        return best

    def _remember(self, body: bytes, conversation: _Conversation, earlier: _Conversation | None) -> None:
        """Store the marks of a request in place of `earlier`, the same conversation's last request."""
        conversation.window = _window(body, conversation.marks[0])
        conversation.num_behind = len(body) - conversation.marks[-1].end
        conversation.behind = _digest_of_end(body, conversation.num_behind)
        others = [one for one in self._conversations if one is not earlier]
        self._conversations = [conversation, *others][:_MAX_CONVERSATIONS]


def _new_marks(
    body: bytes,
    source: bytes,
    groups: Sequence[Sequence[msgspec.Raw]],
    request: ParsedRequest,
    num_items: int,
    digest: xxhash.xxh3_128,
    digested: int,
) -> list[_Mark]:
    """Return marks behind the last runs of `request`; none if a dialect made one of the messages itself.

    `source`: the text that was decoded; its end is the end of `body`. `num_items`: messages before the first group.
    `digest` has read `digested` bytes of the body.
    """
    shift = len(body) - len(source)
    first_marked = len(groups) - _MAX_MARKS
    view = memoryview(body)
    marks = []
    for at, group in enumerate(groups):
        num_items += len(group)
        if at < first_marked:
            continue
        offset = _offset_in(source, group[-1])
        if offset is None:
            return []
        if at + 1 < len(groups) and (_offset_in(source, groups[at + 1][0]) or 0) < offset:
            continue  # a message of the next run stands before this run's end
        end = offset + len(memoryview(group[-1])) + shift
        digest.update(view[digested:end])
        digested = end
        run = request.runs[at]
        number = request.num_skipped + at + 1
        keys = (request.keys[at + 1], request.loose_keys[at + 1])
        prefix = HistoryPrefix(number, num_items, *keys, run.call_ids, run.unread_ids)
        marks.append(_Mark(end, digest.digest(), prefix, request.runs[at].assistant))
    return marks


def _window(body: bytes, mark: _Mark) -> bytes:
    """The bytes before a mark: comparing them is a cheap first test before digests are compared."""
    return body[max(0, mark.end - _WINDOW_BYTES) : mark.end]


def _digest_of_end(body: bytes, num_bytes: int) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(body)[len(body) - num_bytes :])


def _offset_in(source: bytes, value: msgspec.Raw) -> int | None:
    """The offset of a value in the text that it was decoded from; None if a dialect made the value itself.

    msgspec's raw values are slices of the decoded text, whose offsets it does not expose; they follow from addresses.
    """
    offset = _address(value) - _address(source)
    return offset if 0 <= offset < len(source) else None


def _address(buffer: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
