"""Bytes of a request → what is new in it: the head, the wishes, and the runs of messages behind what was read before.

Why here: clients send their whole history with every call; reading it all again would cost more than everything else of a turn.
Called by: `prompts.py`, once per request: on the event loop where most of it is known, else, if it is long, in a thread.

    body   {"model":…, "messages":[ m1, m2, m3, m4, m5 ], "system":…, "tools":[…]}
           `- digest of these bytes known from the last call -´ `--- parsed ---´

A mark is a place in an earlier body at which a run of messages ended. Where a new body has the same bytes up to a mark, it says the
same up to there, and only what follows is parsed. Any other body is parsed whole: a mark never changes what is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import orjson
import xxhash

from adapter.conversation import MessageRun, Preamble, RequestOptions, extend_key
from adapter.dialects.base import Dialect, Fields, InvalidRequestError
from adapter.prompt.preamble_cache import PreambleCache

_FIELDS = msgspec.json.Decoder(Fields)
_MAX_MARKS, _MAX_TIPS, _WINDOW_BYTES = 6, 8, 64


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """`units` follow `num_skipped` units that an earlier call had, too; `keys[i]` stands for the history before units[i]."""

    head: Preamble
    wishes: RequestOptions
    num_skipped: int
    units: list[MessageRun]
    keys: list[bytes]


class _Mark(msgspec.Struct, frozen=True, gc=False):
    """`end`: offset behind a run; `digest` of all bytes before it; `key` of the history up to there; `answer`: whose run it is."""

    end: int
    num_units: int
    num_items: int
    key: bytes
    answer: bool
    digest: bytes = b""


class _Tip(msgspec.Struct, gc=False):
    """The last request of one conversation: the fields before its messages, and its last marks."""

    before: Fields
    head: Preamble
    marks: list[_Mark]
    window: bytes


_Known = tuple[_Tip | None, _Mark | None, xxhash.xxh3_128 | None]
"""A conversation, a mark of it, and the digest of the bytes before that mark."""
_UNKNOWN: _Known = (None, None, None)


@dataclass(slots=True)
class _Parsed:
    """A body behind a mark, or a whole one. `shift`: what must be added to an offset in `source` to get one in the body."""

    source: bytes
    shift: int
    fields: Fields
    items: list[msgspec.Raw]


class RequestParser:
    """One session's. `heads` is shared by all of a process."""

    def __init__(self, heads: PreambleCache) -> None:
        self._heads = heads
        self._tips: list[_Tip] = []

    def num_new_bytes(self, body: bytes) -> int:
        """How much of it `read` has to parse."""
        mark = self._known(body)[1]
        return len(body) - (mark.end if mark else 0)

    def read(self, body: bytes, dialect: Dialect, headers: Mapping[str, str], whole: bool = False) -> ParsedRequest:
        """Raises InvalidRequestError. `whole`: nothing is skipped."""
        tip, mark, digest = _UNKNOWN if whole else self._known(body)
        parsed = _parse(body, dialect, tip, mark)
        head = self._heads.of(dialect, parsed.fields)
        if tip is not None and mark is not None and (head.key != tip.head.key or not _next_run(dialect, parsed, mark)):
            return self.read(body, dialect, headers, whole=True)
        units, runs = _units(dialect, parsed.items, mark.num_items if mark else 0)
        keys = [mark.key if mark else head.key]
        for unit in units:
            keys.append(extend_key(keys[-1], unit.key))
        reading = ParsedRequest(
            head, dialect.wishes(parsed.fields, headers), mark.num_units if mark else 0, units, keys
        )
        kept = [one for one in tip.marks if one.end <= mark.end] if tip and mark else []
        kept += _digested(body, digest, mark.end if mark else 0, _new_marks(parsed, reading, runs, mark))
        if kept:
            self._remember(body, kept[-_MAX_MARKS:], tip, tip.before if tip else _before(parsed), reading.head)
        return reading

    def _known(self, body: bytes) -> _Known:
        """The furthest mark up to which these bytes were read before, and which more messages follow."""
        best = _UNKNOWN
        view = memoryview(body)
        for tip in self._tips:
            first = tip.marks[0].end
            if body[max(0, first - _WINDOW_BYTES) : first] != tip.window:
                continue
            digest, at = xxhash.xxh3_128(), 0
            for mark in tip.marks:
                digest.update(view[at : mark.end])
                at = mark.end
                if digest.digest() != mark.digest:
                    break
                if (best[1] is None or mark.end > best[1].end) and body[at : at + 1] == b",":
                    best = (tip, mark, digest.copy())
        return best

    def _remember(self, body: bytes, marks: list[_Mark], tip: _Tip | None, before: Fields, head: Preamble) -> None:
        first = marks[0].end
        made = _Tip(before, head, marks, body[max(0, first - _WINDOW_BYTES) : first])
        self._tips = [made, *(one for one in self._tips if one is not tip)][:_MAX_TIPS]


def _parse(body: bytes, dialect: Dialect, tip: _Tip | None, mark: _Mark | None) -> _Parsed:
    source, shift = body, 0
    fields: Fields = {}
    if tip is not None and mark is not None:
        source = b'{"' + dialect.history.encode() + b'":[' + body[mark.end + 1 :]
        shift, fields = len(body) - len(source), dict(tip.before)
    try:
        source.decode()  # what msgspec passes over unread has to be text, too
        fields |= _FIELDS.decode(source)
        return _Parsed(source, shift, fields, dialect.items(fields.get(dialect.history)))
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is no JSON object as expected: {error}") from error


def _next_run(dialect: Dialect, parsed: _Parsed, mark: _Mark) -> bool:
    """Whether the run before the mark is over: the next message is of the other side."""
    return bool(parsed.items) and dialect.is_answer(parsed.items[0]) != mark.answer


def _units(dialect: Dialect, items: Sequence[msgspec.Raw], first: int) -> tuple[list[MessageRun], list[int]]:
    """Runs of items of one side. `first`: the number of items[0] in the body, for messages to people."""
    sides = [dialect.is_answer(item) for item in items]
    units, runs, at = [], [], 0
    while at < len(items):
        end = at + 1
        while end < len(items) and sides[end] == sides[at]:
            end += 1
        where = f"{dialect.history}.{first + at}"
        try:
            values = [orjson.loads(memoryview(item)) for item in items[at:end]]
            units.append(MessageRun.of(dialect.messages(values, first + at)))
        except orjson.JSONDecodeError as error:
            raise InvalidRequestError(f"{where}: {error}") from error
        except (RecursionError, TypeError) as error:
            raise InvalidRequestError(f"{where}: nested too deeply ({error})") from error
        runs.append(end - at)
        at = end
    return units, runs


def _new_marks(parsed: _Parsed, reading: ParsedRequest, runs: Sequence[int], mark: _Mark | None) -> list[_Mark]:
    """One behind each of the last runs; none where a body was mended, for then there is no such place in its bytes."""
    if not _within(parsed.items, parsed.source):
        return []
    marks, item = [], 0
    for no, (unit, length) in enumerate(zip(reading.units, runs, strict=True), start=1):
        item += length
        if no <= len(reading.units) - _MAX_MARKS:
            continue
        last = parsed.items[item - 1]
        end = _address(last) - _address(parsed.source) + len(memoryview(last)) + parsed.shift
        num_items = item + (mark.num_items if mark else 0)
        marks.append(_Mark(end, reading.num_skipped + no, num_items, reading.keys[no], unit.assistant))
    return marks


def _digested(body: bytes, digest: xxhash.xxh3_128 | None, at: int, marks: Sequence[_Mark]) -> list[_Mark]:
    """`digest`: of the body up to `at`; what stands before it is not read again."""
    digest, view, done = digest or xxhash.xxh3_128(), memoryview(body), []
    for mark in marks:
        digest.update(view[at : mark.end])
        at = mark.end
        done.append(msgspec.structs.replace(mark, digest=digest.digest()))
    return done


def _before(parsed: _Parsed) -> Fields:
    """The fields that stand before the messages, so that a body which is parsed from a mark has them, too. Copied: a view would keep
    the whole body alive."""
    start = _address(parsed.items[0])
    return {name: msgspec.Raw(bytes(raw)) for name, raw in parsed.fields.items() if _address(raw) < start}


def _within(items: Sequence[msgspec.Raw], source: bytes) -> bool:
    start = _address(source)
    return bool(items) and start <= _address(items[0]) < start + len(source)


def _address(buffer: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
