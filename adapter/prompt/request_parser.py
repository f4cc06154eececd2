"""Parse a request's body: the preamble, the options, and the messages as runs of one side.

This is the plain parser. `incremental_parser.py` calls it with the part of a body that is new.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import groupby

import msgspec
import orjson

from adapter.conversation import Message, MessageRun, Preamble, RequestOptions, extend_key
from adapter.dialects.base import Dialect, Fields, InvalidRequestError
from adapter.dialects.fields import check_fields

_LANE_CHARS = 100
_FIELDS = msgspec.json.Decoder(Fields)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request without the messages that were parsed with an earlier one.

    `runs` follow `num_skipped` runs that are left out. keys[i] is the key of the history before runs[i]; the last key
    is that of the whole history. `loose_keys`: the same of loose keys.
    """

    preamble: Preamble
    options: RequestOptions
    num_skipped: int
    runs: list[MessageRun]
    keys: list[bytes]
    loose_keys: list[bytes] = field(default_factory=list)


class HistoryPrefix(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a history, up to the end of a run: its numbers of runs and of wire messages, and its keys.

    `call_ids`, `unread_ids`: of the tool calls of its last run.
    """

    num_runs: int
    num_items: int
    key: bytes
    loose_key: bytes
    call_ids: tuple[str, ...] = ()
    unread_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class HistoryRepairs:
    """Repairs of the histories of agents that change what they send back.

    `split` takes each message of an answer that has no reasoning, and returns it with the thinking that its text has.
    `knows` takes the answer as it was sent, with the keys of the history before it, and returns whether it is a stored
    answer, perhaps without its reasoning: then a text that begins with thinking is the answer's own. `calls_of` takes
    the id of a call, and returns the ids of all calls of the stored answer that made it, none if it is not known.
    `restore` takes each answer, with the keys of the history before it, and returns the answer to use. If
    `orders_results`, the results of parallel tool calls are put into the order of the calls.
    """

    restore: Callable[[bytes, MessageRun, bytes], MessageRun] | None = None
    orders_results: bool = False
    split: Callable[[Message], Message] | None = None
    knows: Callable[[bytes, MessageRun, bytes], bool] | None = None
    calls_of: Callable[[str], Collection[str]] | None = None


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
    repairs: HistoryRepairs,
) -> ParsedRequest:
    """Parse messages that follow `prefix`, already grouped (`group_by_side`). Raises InvalidRequestError."""
    runs: list[MessageRun] = []
    keys = [prefix.key]
    loose_keys = [prefix.loose_key]
    before = prefix
    for group in groups:
        run = _parse_run(group, before, dialect, repairs)
        if repairs.restore is not None and run.assistant:
            run = repairs.restore(keys[-1], run, loose_keys[-1])
        runs.append(run)
        keys.append(extend_key(keys[-1], run.key))
        loose_keys.append(extend_key(loose_keys[-1], run.loose_key))
        num_items = before.num_items + len(group)
        num_runs = before.num_runs + 1
        before = HistoryPrefix(num_runs, num_items, keys[-1], loose_keys[-1], run.call_ids, run.unread_ids)
    check_fields(dialect.rules, body.fields)
    options = dialect.options(body.fields, headers, preamble)
    options = replace(options, lane=_lane_key(options.lane), tool_forms=preamble.forms)
    return ParsedRequest(preamble, options, prefix.num_runs, runs, keys, loose_keys)


def decode_body(body: bytes, dialect: Dialect) -> DecodedBody:
    """Decode a body one level deep. Raises InvalidRequestError if it is not a JSON object with messages."""
    if not body.strip():
        raise InvalidRequestError("the body is empty: a JSON object is expected")
    try:
        body.decode()  # msgspec does not check the encoding of values that it keeps as bytes
        fields = _FIELDS.decode(body)
        return DecodedBody(fields, dialect.items(fields.get(dialect.history)))
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is no JSON object as expected: {error}") from error


def group_by_side(items: Sequence[msgspec.Raw], dialect: Dialect, repairs: HistoryRepairs) -> list[list[msgspec.Raw]]:
    """Group consecutive messages of one side: the assistant's, or all others.

    Some agents send each of several calls with its result behind it. If these calls are known to be of one answer, they
    are put together, and their results behind them.
    """
    groups: list[list[msgspec.Raw]] = []
    is_joined = False
    for is_answer, found in groupby(items, dialect.is_answer):
        group = list(found)
        if is_answer and len(groups) >= 2 and repairs.calls_of is not None:
            is_joined = _is_of_answer(group, groups[-2], groups[-1], dialect, repairs.calls_of)
            if is_joined:
                groups[-2] += group
                continue
        if is_joined and not is_answer:
            groups[-1] += group
        else:
            groups.append(group)
    return groups


def _is_of_answer(
    group: Sequence[msgspec.Raw],
    answer: Sequence[msgspec.Raw],
    results: Sequence[msgspec.Raw],
    dialect: Dialect,
    calls_of: Callable[[str], Collection[str]],
) -> bool:
    """Return whether a group has only calls of `answer`, and `results`, the last group, only results of `answer`."""
    made = dialect.call_ids(group[0]).made
    known = calls_of(made[0]) if made else ()
    earlier = dialect.call_ids(answer[-1]).made if known else ()
    if not earlier or not set(earlier) <= set(known):
        return False
    later = [dialect.call_ids(item) for item in group]
    return all(one.made and not one.has_text and set(one.made) <= set(known) for one in later) and all(
        dialect.call_ids(item).answered in known for item in results
    )


def _in_call_order(messages: list[Message], call_ids: tuple[str, ...]) -> list[Message]:
    """Put tool results into the order of their calls; all other messages stay where they are.

    A template that shows no ids would otherwise show a result as that of another call. Results that are not of these
    calls, or twice of one, stay as they are, and are refused later.
    """
    results = [message for message in messages if message.role == "tool"]
    ids = [message.tool_call_id for message in results]
    if len(set(ids)) < len(ids) or not set(ids) <= set(call_ids):
        return messages
    ordered = iter(sorted(results, key=lambda message: call_ids.index(message.tool_call_id)))
    return [next(ordered) if message.role == "tool" else message for message in messages]


def _lane_key(lane: str) -> str:
    """The lane as it is stored: long ones become their digest, since an index cannot hold a text of any length."""
    return lane if len(lane) <= _LANE_CHARS else blake2b(lane.encode(), digest_size=16).hexdigest()


def _without_unread(messages: list[Message], unread_ids: frozenset[str]) -> list[Message]:
    """Turn the results of calls that became text into text of the user's, which is no new question."""
    return [
        replace(message, role="user", tool_call_id="", beside_tool=True)
        if message.role == "tool" and message.tool_call_id in unread_ids
        else message
        for message in messages
    ]


def _parse_run(
    items: Sequence[msgspec.Raw], before: HistoryPrefix, dialect: Dialect, repairs: HistoryRepairs
) -> MessageRun:
    """Parse the messages of the run that follows `before`."""
    where = f"{dialect.history}.{before.num_items}"
    try:
        values = [orjson.loads(memoryview(item)) for item in items]
        messages = dialect.messages(values, before.num_items)
        messages = _without_unread(messages, before.unread_ids) if before.unread_ids else messages
        orders = repairs.orders_results and len(before.call_ids) > 1
        run = MessageRun.of(_in_call_order(messages, before.call_ids) if orders else messages)
        return _with_split_thinking(run, messages, before, repairs)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{where}: {error}") from error
    except (RecursionError, TypeError) as error:
        raise InvalidRequestError(f"{where}: nested too deeply ({error})") from error


def _with_split_thinking(
    run: MessageRun, messages: Sequence[Message], before: HistoryPrefix, repairs: HistoryRepairs
) -> MessageRun:
    """The run with the thinking that a client wrote into the texts of its messages. A known answer stays as it is."""
    if repairs.split is None or not run.assistant or run.messages[0].reasoning:
        return run
    split = [repairs.split(message) for message in messages]
    is_changed = any(one.reasoning for one in split)
    if not is_changed or (repairs.knows is not None and repairs.knows(before.key, run, before.loose_key)):
        return run
    return MessageRun.of(split)
