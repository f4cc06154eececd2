"""Parsing only the new part of a body gives the same request as parsing the whole body."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.dialects.base import Dialect
from adapter.dialects.chat import ChatDialect
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from adapter.prompt.incremental_parser import IncrementalParser
from adapter.prompt.preamble_cache import PreambleCache
from adapter.prompt.request_parser import HistoryRepairs

DIALECTS: list[Dialect] = [MessagesDialect(), ChatDialect(), ResponsesDialect()]
TEXTS = st.sampled_from(["", "a", '"messages":[', '{"role":"user","content":"b"}', "é\U0001f600", "x" * 100])
STEPS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "cut", "repeat"]), TEXTS), min_size=1, max_size=20)


@given(steps=STEPS, dialect=st.sampled_from(DIALECTS), first=st.booleans(), changes=st.sets(st.integers(0, 19)))
@settings(max_examples=200, deadline=None)
def test_a_parser_with_earlier_bodies_gives_the_requests_of_a_new_parser(
    steps: list[tuple[str, str]], dialect: Dialect, first: bool, changes: set[int]
) -> None:
    """Histories grow, are cut and sent again.

    The system text changes at `changes`; messages are the `first` field or the last.
    """
    preambles = PreambleCache()
    parser = IncrementalParser(preambles)
    messages = [{"role": "user", "content": "q"}]
    system = dialect.preamble_fields[0] if dialect.name != "chat" else "user"
    for number, (step, text) in enumerate(steps):
        if step == "cut":
            del messages[max(1, len(messages) // 2) :]
        elif step != "repeat":
            messages.append({"role": step, "content": text or "t"})
        fields = {system: f"s{len(changes & set(range(number)))}", "metadata": {dialect.history: messages[:1]}}
        history = {dialect.history: messages}
        body = orjson.dumps(history | fields if first else fields | history)
        known = parser.parse(body, dialect, {})
        whole = IncrementalParser(preambles).parse(body, dialect, {})
        assert whole.num_skipped == 0 and known.preamble.key == whole.preamble.key
        assert known.options == whole.options
        assert known.runs == whole.runs[known.num_skipped :]
        assert known.keys == whole.keys[known.num_skipped :]


def test_only_the_new_messages_are_parsed() -> None:
    parser = IncrementalParser(PreambleCache())
    messages = [{"role": "user", "content": "q"}]
    for turn in range(10):
        body = orjson.dumps({"system": "s", "messages": messages, "max_tokens": 5})
        request = parser.parse(body, DIALECTS[0], {})
        assert request.num_skipped == max(0, 2 * turn - 1)
        messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": str(turn)}]


def test_known_fields_behind_the_messages_are_no_new_bytes() -> None:
    """Long tools behind the messages are not parsed again, so they must not send each call to a thread."""
    parser = IncrementalParser(PreambleCache())
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

    def body(text: str, system: str) -> bytes:
        history = [*messages, {"role": "user", "content": text}]
        return orjson.dumps({"messages": history, "system": system, "max_tokens": 5})

    parser.parse(body("r", "s" * 50_000), DIALECTS[0], {})
    assert parser.num_new_bytes(body("t" * 1000, "s" * 50_000)) < 1100
    assert parser.num_new_bytes(body("t" * 1000, "z" * 50_000)) > 50_000
    assert parser.num_new_bytes(body("t" * 50_000, "s")) > 50_000


def test_a_history_that_is_no_list_of_messages_is_parsed_again_each_time() -> None:
    """A body with the history twice: JSON's last one wins, and the dialect makes a message of its text."""
    responses = next(dialect for dialect in DIALECTS if dialect.name == "responses")
    parser = IncrementalParser(PreambleCache())
    history = (
        '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]'
    )
    parser.parse(f'{{"model": "m", "input": {history}}}'.encode(), responses, {})
    body = f'{{"model": "m", "input": {history[:-1]}, {{"role": "user", "content": "s"}}], "input": "hello"}}'.encode()
    first, again = (parser.parse(body, responses, {}) for _ in range(2))
    assert first.keys[-1] == again.keys[-1]


def test_a_run_of_messages_that_goes_on_behind_the_mark_is_left_to_a_whole_parse() -> None:
    """Few bytes are new then, but all are parsed, so the caller must be able to do it in a thread."""
    parser = IncrementalParser(PreambleCache())
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    first = orjson.dumps({"system": "s", "messages": messages, "max_tokens": 5})
    parser.parse(first, DIALECTS[0], {})
    messages.append({"role": "user", "content": "go on"})
    body = orjson.dumps({"system": "s", "messages": messages, "max_tokens": 5})
    assert parser.num_new_bytes(body) < 100
    assert parser.parse_new(body, DIALECTS[0], {}) is None
    assert parser.parse(body, DIALECTS[0], {}).num_skipped == 0


CALLS = {one: ("a", "b", "c") for one in "abc"} | {"d": ("d",)}


def called(dialect: Dialect, call_id: str) -> dict[str, object]:
    if dialect.name == "responses":
        return {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": "{}"}
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def returned(dialect: Dialect, call_id: str) -> dict[str, object]:
    if dialect.name == "responses":
        return {"type": "function_call_output", "call_id": call_id, "output": f"out {call_id}"}
    return {"role": "tool", "tool_call_id": call_id, "content": f"out {call_id}"}


@pytest.mark.parametrize("dialect", [ChatDialect(), ResponsesDialect()], ids=["chat", "responses"])
def test_calls_of_one_answer_with_their_results_between_them_are_put_together(dialect: Dialect) -> None:
    """At once, and if the history grows by one item at a time: marks never stand between them."""
    parser = IncrementalParser(PreambleCache(), HistoryRepairs(calls_of=lambda one: CALLS.get(one, ())))
    first = called(dialect, "a") | ({"content": "Text."} if dialect.name == "chat" else {})
    items: list[dict[str, object]] = [{"role": "user", "content": "q"}, first]
    items += [returned(dialect, "a"), called(dialect, "b"), returned(dialect, "b"), called(dialect, "c")]
    items += [returned(dialect, "c"), called(dialect, "d"), returned(dialect, "d"), {"role": "user", "content": "q"}]
    shown = {}
    for number in (1, 3, 5, 7, 9, 10, 10):
        body = orjson.dumps({"model": "m", dialect.history: items[:number]})
        known = parser.parse(body, dialect, {})
        whole = IncrementalParser(PreambleCache(), parser._repairs).parse(body, dialect, {})
        assert known.runs == whole.runs[known.num_skipped :] and known.keys == whole.keys[known.num_skipped :]
        shown[number] = [[one.id for one in run.messages[0].tool_calls] for run in whole.runs if run.assistant]
        results = [one.text for one in whole.runs[2].messages] if number > 1 else []
    expected = {1: [], 3: [["a"]], 5: [["a", "b"]], 7: [["a", "b", "c"]], 9: [["a", "b", "c"], ["d"]]}
    assert shown == expected | {10: expected[9]}
    assert results == ["out a", "out b", "out c"]


def test_a_later_message_with_text_is_no_part_of_an_answer() -> None:
    dialect = ChatDialect()
    items = [{"role": "user", "content": "q"}, called(dialect, "a"), returned(dialect, "a")]
    items += [called(dialect, "b") | {"content": "more"}, returned(dialect, "b")]
    repairs = HistoryRepairs(calls_of=lambda one: CALLS.get(one, ()))
    body = orjson.dumps({"messages": items})
    assert len(IncrementalParser(PreambleCache(), repairs).parse(body, dialect, {}).runs) == 5


def test_calls_that_are_not_known_stay_where_they_are() -> None:
    dialect = ResponsesDialect()
    items = [{"role": "user", "content": "q"}, called(dialect, "x"), returned(dialect, "x"), called(dialect, "y")]
    body = orjson.dumps({"input": [*items, returned(dialect, "y")]})
    repairs = HistoryRepairs(calls_of=lambda one: CALLS.get(one, ()))
    assert len(IncrementalParser(PreambleCache(), repairs).parse(body, dialect, {}).runs) == 5
