"""Parse a request's body: the preamble, the options, and the messages as runs of one side.

This is the plain parser. `incremental_parser.py` calls it with the part of a body that is new.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby

import msgspec
import orjson

from adapter.conversation import MessageRun, Preamble, RequestOptions, extend_key
from adapter.dialects.base import Dialect, Fields, InvalidRequestError
from adapter.dialects.fields import check_fields

_LANE_CHARS = 100
_FIELDS = msgspec.json.Decoder(Fields)
Restore = Callable[[bytes, MessageRun], MessageRun]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request without the messages that were parsed with an earlier one.

    `runs` follow `num_skipped` runs that are left out. keys[i] is the key of the history before runs[i]; the last key
    is that of the whole history.
    """

    preamble: Preamble
    options: RequestOptions
    num_skipped: int
    runs: list[MessageRun]
    keys: list[bytes]


class HistoryPrefix(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a history, up to the end of a run: its numbers of runs and of wire messages, and its key."""

    num_runs: int
    num_items: int
    key: bytes


@dataclass(frozen=True, slots=True)
class DecodedBody:
    """A JSON body, decoded one level deep; `items` are the messages."""

    fields: Fields
    items: list[msgspec.Raw]


def parse_request(
    body: DecodedBody,
    groups: Sequence[Sequence[msgspec.Raw]],
    preamble: Preamble,
    prefix: HistoryPrefix,
    dialect: Dialect,
    headers: Mapping[str, str],
    restore: Restore | None = None,
) -> ParsedRequest:
    """Parse messages that follow `prefix`, already grouped (`group_by_side`). Raises InvalidRequestError.

    `restore` is given each answer, with the key of the history before it, and returns the answer to use.
    """
    runs: list[MessageRun] = []
    keys = [prefix.key]
    first = prefix.num_items
    for group in groups:
        run = _parse_run(group, first, dialect)
        runs.append(restore(keys[-1], run) if restore is not None and run.assistant else run)
        keys.append(extend_key(keys[-1], runs[-1].key))
        first += len(group)
    check_fields(dialect.rules, body.fields)
    options = dialect.options(body.fields, headers)
    options = replace(options, lane=_lane_key(options.lane), tool_forms=preamble.forms)
    return ParsedRequest(preamble, options, prefix.num_runs, runs, keys)


def decode_body(body: bytes, dialect: Dialect) -> DecodedBody:
    """Decode a body one level deep. Raises InvalidRequestError if it is not a JSON object with messages."""
    try:
        body.decode()  # msgspec does not check the encoding of values that it keeps as bytes
        fields = _FIELDS.decode(body)
        return DecodedBody(fields, dialect.items(fields.get(dialect.history)))
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is no JSON object as expected: {error}") from error


def group_by_side(items: Sequence[msgspec.Raw], dialect: Dialect) -> list[list[msgspec.Raw]]:
    """Group consecutive messages of one side: the assistant's, or all others."""
    return [list(group) for _, group in groupby(items, dialect.is_answer)]


def _lane_key(lane: str) -> str:
    """The lane as it is stored and compared.

    Clients may send a text of any length, which an index cannot hold; long ones become their digest.
    """
    return lane if len(lane) <= _LANE_CHARS else blake2b(lane.encode(), digest_size=16).hexdigest()


def _parse_run(items: Sequence[msgspec.Raw], first: int, dialect: Dialect) -> MessageRun:
    """Parse the messages of one run. `first`: the index of items[0] in the body, for error messages."""
    where = f"{dialect.history}.{first}"
    try:
        values = [orjson.loads(memoryview(item)) for item in items]
        return MessageRun.of(dialect.messages(values, first))
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{where}: {error}") from error
    except (RecursionError, TypeError) as error:
        raise InvalidRequestError(f"{where}: nested too deeply ({error})") from error
