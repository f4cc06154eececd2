"""A further attempt gets the answers of the attempts before it again, as long as its agent asks the same.

A box may die. The next attempt's agent begins anew in a fresh box, does its commands again and asks the same. The turn
that answered moves to the new session: it stays one row, which is trained at most once, and nothing is sampled.

    a turn is     that is                                        who makes it so, and on which condition
    recorded      completed, in the closed session of an         `boot` of the next attempt, which closes that session
                  earlier attempt
    replayed      in this attempt's session; `replayed_at` is    The process that got the same request: of the same lane
                  set; not delivered yet                         and kind, behind the same turn, with the same new
                                                                 messages but for volatile parts of results and of the
                                                                 first question, and options that its sample fits. One
                                                                 statement moves the row: before its commit a repeated
                                                                 request does so, after it gets the stored answer.
    live          sampled for this attempt                       No recorded turn has the request. What comes behind it
                                                                 is live, too: no recorded turn is behind a live one.

A result that differs in volatile parts alone is represented by the recorded tokens, so the context of later samples is
what the model has seen. The key of the client's own history is stored with the turn, by which its next request is
recognised. The answer before a message that came by itself, such as the end of a program in the background, comes no
earlier than it did, counted from the request that first named the program. Not replayed are a turn that two boxes have
ended behind, since its commands may be the cause; one whose tokens begin with those of a turn that was not replayed;
and those of an attempt that has a patch, which may be graded.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from adapter.conversation import answer_from_json
from adapter.prompt.prompt_builder import PreparedCall
from adapter.prompt.session_cache import LiveSession
from adapter.turns.call_options import CallOptions, fits
from adapter.turns.volatile_text import names_any, volatile_words, without_volatile
from store.arrays import pack_json, unpack_json
from store.database import Database
from store.replayed_turns import RecordedTurn, load_recorded, move_turn
from store.tool_uses import read_tool_uses


class RecordedCall(NamedTuple):
    """A recorded turn and the request that it answers: lane, kind, the turn that it is behind, key of its messages.
    `contents`: of the messages, with their volatile parts. `commands`: of all recorded turns, by ids of calls. `cause`:
    the turn whose request first named what a message of this one is about, which came by itself."""

    turn: RecordedTurn
    asked: tuple[str, str, int | None, bytes]
    contents: list[Any]
    commands: dict[str, str]
    cause: RecordedTurn | None


async def replay(database: Database, session: LiveSession, prepared: PreparedCall) -> bool:
    """Move the recorded turn that answers this request to the session; False if there is none."""
    row = session.row
    if session.recorded is None:
        turns = await database.read(load_recorded, row.rollout_id, row.attempt)
        session.recorded = await asyncio.to_thread(_script, turns)
    preamble, after = prepared.request.preamble, prepared.after_turn_id
    place = (prepared.lane, prepared.kind, after)
    recorded: list[RecordedCall] = [one for one in session.recorded or [] if one.asked[:3] == place]
    if not recorded:
        return False
    opening = None if after is not None else [preamble.system, preamble.tools]
    contents, commands = [message["content"] for message in prepared.new_messages], recorded[0].commands
    key = await asyncio.to_thread(_key, prepared.new_messages, commands, opening)
    same = sorted((one for one in recorded if one.asked[3] == key), key=lambda one: one.contents != contents)
    is_free = after is not None or not (session.tree.num_turns or session.replayed)  # later ones may mean the date
    if not same or not (is_free or same[0].contents == contents):
        return False
    call = same[0]
    answer: Any = unpack_json(call.turn.answer)
    options = CallOptions.of(prepared.request.options, prepared.max_tokens)
    asked = answer.get("asked")
    made_for = CallOptions.from_json(asked)._replace(call_key="") if asked else None  # each call has a key of its own
    given = answer_from_json(call.turn.id, answer)
    for old, message in zip(call.contents, prepared.new_messages, strict=True):
        command = commands.get(message.get("tool_call_id", ""), "")
        session.stale |= volatile_words(old or "", command) - volatile_words(message["content"] or "", command)
    used = orjson.dumps([one.arguments for one in given.message.tool_calls]).decode()
    # An answer may name a process or a file of the lost box.
    if names_any(used, session.stale) or not fits(made_for, options, given, row.endpoint is not None):
        return False
    answer["asked"] = asked and asked | {"call_key": options.call_key}
    changed = (_with_key_of(prepared, call.turn.request), pack_json(answer))
    is_moved = await database.run(move_turn, call.turn.id, row.id, row.attempt, prepared.digest, *changed)
    session.recorded = [one for one in session.recorded or [] if one is not call]
    if is_moved:
        session.replayed[call.turn.id] = time.monotonic()
        await asyncio.sleep(_wait_seconds(session, call.turn))
    return is_moved


def _wait_seconds(session: LiveSession, turn: RecordedTurn) -> float:
    """Return the time after which the replayed turn may be answered, at most 240 seconds: clients wait longer."""
    ends = [
        session.replayed[one.cause.id] + ((turn.answered_at or one.turn.asked_at) - one.cause.asked_at).total_seconds()
        for one in session.recorded or []
        if one.asked[2] == turn.id and one.cause is not None and one.cause.id in session.replayed
    ]
    return min(max(ends, default=0.0) - time.monotonic(), 240.0)


def _script(turns: Sequence[RecordedTurn]) -> list[RecordedCall]:
    answers: list[Any] = [unpack_json(turn.answer) for turn in turns]
    uses = {(use.call_id, use.body) for one in answers for use in read_tool_uses(one["message"]) if use.kind == "shell"}
    counts = Counter(call_id for call_id, _ in uses)  # some models give each turn's calls the same ids
    commands = {call_id: body for call_id, body in uses if call_id and counts[call_id] == 1}
    recorded: list[tuple[RecordedTurn, Any]] = [(turn, unpack_json(turn.request)) for turn in turns]
    calls, causes = list[RecordedCall](), _causes(recorded)
    for turn, request in recorded:
        preamble = [request["system"], request["tools"]] if request["after"] is None else None
        asked = (turn.lane, turn.kind, request["after"], _key(request["messages"], commands, preamble))
        contents = [message["content"] for message in request["messages"]]
        calls.append(RecordedCall(turn, asked, contents, commands, causes.get(turn.id)))
    followed = {call.asked[2] for call in calls}
    return [call for call in calls if not call.turn.is_replayed or call.turn.id in followed]


def _causes(recorded: Sequence[tuple[RecordedTurn, Any]]) -> dict[int, RecordedTurn]:
    """Return `cause` by ids of turns: beside results their requests have a message with an id that was named before."""
    causes, before = dict[int, RecordedTurn](), list[tuple[RecordedTurn, str]]()
    for turn, request in sorted(recorded, key=lambda one: one[0].asked_at):
        told = [one["content"] for one in request["messages"] if one["role"] not in ("tool", "assistant")]
        words = {one for text in told for one in volatile_words(text) if len(one) >= 8 and re.search("[a-z]", one)}
        named = [one for one, text in before if any(word in text for word in words)]
        if named and len(told) < len(request["messages"]):
            causes[turn.id] = named[0]
        before.append((turn, "\n".join(one["content"] for one in request["messages"])))
    return causes


def _key(messages: Sequence[dict[str, Any]], commands: dict[str, str], preamble: Sequence[Any] | None) -> bytes:
    """Equal for messages in the form of templates that differ in ids of calls and volatile parts alone. `preamble`:
    system text and tools, if the messages begin a conversation."""
    parts: list[Any] = []
    for message in messages:
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
        command, text = commands.get(message.get("tool_call_id", ""), ""), message["content"]
        text = text if message["role"] == "assistant" else without_volatile(text, command)
        parts.append([message["role"], text, message.get("reasoning_content", ""), calls])
    opening = None if preamble is None else [without_volatile(preamble[0]), preamble[1]]
    return blake2b(orjson.dumps([opening, parts], option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def _with_key_of(prepared: PreparedCall, packed: bytes) -> bytes:
    """Return the stored request with the keys of the request that it answers now, if they are other ones."""
    request: Any = unpack_json(packed)
    keys = [prepared.request.keys[-1].hex(), prepared.request.loose_keys[-1].hex()]
    is_same = keys == [request["keys"][-1], request["loose_key"]]
    return packed if is_same else pack_json(request | {"asked_again": keys})
