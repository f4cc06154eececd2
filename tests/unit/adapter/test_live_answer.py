"""The shown part of an answer is its beginning, for any output and any parsers.

vLLM's parsers are imported once for this file (about 13 CPU seconds).
"""

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapter.conversation import Answer, Message, Preamble, RequestOptions, ShownText, TokenLogprob, ToolCall
from adapter.dialects.base import MAX_STOP_CHARS, MAX_STOPS
from adapter.dialects.chat import ChatDialect
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from adapter.live_answer import LiveAnswer
from adapter.output_parser import OutputParser
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import ParsedRequest
from adapter.vllm_parsers import VllmParsers

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)
PARSERS = [(None, None), ("qwen3_coder", None), ("qwen3_coder", "qwen3"), ("hermes", "deepseek_r1"), ("pythonic", None)]
CALL = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
CALLS = [
    CALL.replace("ls", "echo '</tool_call>' {{}"),
    CALL.replace("ls", "two\n\nlines \u00e9 \U0001f600 \\u00e9"),
    CALL.replace("=command", "=other"),
    CALL.replace("ls", "ls STOP"),
    '<tool_call>\n{"name": "bash", "arguments": {"command": "</tool_call>"}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"command": "\\u00e9 {\\"a\\": {}}", "n": [1.0, {}]}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"\n</tool_call>',
    '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>',
]
PIECES = st.sampled_from(
    [
        "<think>", "</think>", "\n", " ", "  \n", "word", "Look <b>", CALL, CALL[:40], "<tool_call>", "</tool_call>",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "<function=bash>", "STOP", "ST",
        "\U0001f600", "é", "<", "[bash(command='ls')]", "</thin", "<|im_start|>", "<|im_end|>", *CALLS,
    ]
)  # fmt: skip
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": TOOL}}]


@pytest.fixture(scope="module")
def parsers(model_dir: Path) -> list[VllmParsers]:
    made = [VllmParsers(model_dir, *names) for names in PARSERS]
    for one in made:
        one.load()
    return made


OPTIONS = RequestOptions(dialect="chat", stream=True)
DIALECTS = (MessagesDialect(), ChatDialect(), ResponsesDialect())


def read_messages_stream(events: list[Any]) -> list[Any]:
    """The blocks, each of which must be ended."""
    blocks: dict[int, Any] = {}
    ended = set()
    for event in events:
        if event["type"] == "content_block_start":
            assert ended == set(blocks)  # Anthropic's TypeScript SDK takes the end of any block for the last one's
            blocks[event["index"]] = event["content_block"] | {"json": ""}
        if event["type"] == "content_block_delta":
            assert event["index"] not in ended
            for key, new in event["delta"].items():
                if key != "type":
                    name = "json" if key == "partial_json" else key
                    blocks[event["index"]][name] += new
        if event["type"] == "content_block_stop":
            ended.add(event["index"])
    assert ended == set(blocks) and events[-1]["type"] == "message_stop"
    for block in blocks.values():
        if (arguments := block.pop("json")) or block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return list(blocks.values())


def read_chat_stream(chunks: list[Any]) -> Any:
    read: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for key in ("content", "reasoning_content"):
            read[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", []):
            at = call.pop("index")
            if at == len(read["tool_calls"]):
                read["tool_calls"].append(call)
            else:  # no call is filled on behind the next one's beginning: OpenAI's SDKs take that for its end
                assert at == len(read["tool_calls"]) - 1
                filled = read["tool_calls"][at]
                for kind, field in (("function", "arguments"), ("custom", "input")):
                    if kind in call:
                        filled[kind][field] += call[kind][field]
    return read


def read_chat_reply(reply: Any) -> Any:
    message = reply["choices"][0]["message"]
    empty = {"content": "", "reasoning_content": "", "tool_calls": []}
    return {key: message.get(key) or value for key, value in empty.items()}


def read_responses_stream(events: list[Any]) -> list[Any]:
    """The items as they were added, filled and ended."""
    items: dict[int, Any] = {}
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            assert sorted(items) == list(range(event["output_index"]))  # an item ends before the next one begins
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
        if event["type"] == "response.output_item.done":
            items[event["output_index"]] = item = event["item"]
            whole = item.get("arguments") or item.get("input") or item.get("content", [{}])[0].get("text")
            assert texts.get(event["output_index"], "") == whole
    read = [items[number] for number in sorted(items)]
    assert events[-1]["response"]["output"] == read == list(items.values())
    return read


READ_STREAM: dict[str, Any] = {
    "messages": read_messages_stream,
    "chat": read_chat_stream,
    "responses": read_responses_stream,
}
READ_REPLY: dict[str, Any] = {
    "messages": lambda reply: reply["content"],
    "chat": read_chat_reply,
    "responses": lambda reply: reply["output"],
}


def request(tools: Sequence[Any], stops: Sequence[str]) -> ParsedRequest:
    options = RequestOptions(dialect="chat", stream=True, stop_sequences=tuple(stops))
    return ParsedRequest(options=options, preamble=Preamble.of("", tools), runs=[], keys=[], num_skipped=0)


def live_answer(outputs: OutputParser, asked: ParsedRequest) -> LiveAnswer:
    found = outputs.live_answer(asked)
    assert found is not None
    return found


THOUGHT = ["<think>", "\n", "word", "\n", "</think>"]


@example(pieces=[" ", "<think>", "word"], which=3, has_tools=False, stops=(), ended=True, size=1)
@example(pieces=["Look ", CALL, "\n", CALL, CALL[:40]], which=2, has_tools=True, stops=(), ended=False, size=1)
@example(pieces=[CALLS[0], CALLS[1], " and ", CALL, CALLS[2]], which=1, has_tools=True, stops=(), ended=True, size=1)
@example(pieces=[CALLS[5], CALLS[4], CALLS[5]], which=3, has_tools=True, stops=(), ended=True, size=1)
@example(pieces=["</think>", "word", CALL, CALLS[3]], which=2, has_tools=True, stops=("STOP",), ended=False, size=1)
@example(pieces=[*THOUGHT, "\n", "\n", "STOP"], which=2, has_tools=False, stops=("\nSTOP",), ended=False, size=99)
@example(pieces=[*THOUGHT, "\n", "\n", "STOP"], which=2, has_tools=True, stops=("\n\n",), ended=False, size=4)
@example(pieces=[*THOUGHT, "\n", "STOP"], which=3, has_tools=True, stops=("k>\nSTOP",), ended=False, size=99)
@example(pieces=["\n", *THOUGHT, "x"], which=2, has_tools=True, stops=("<think>\n",), ended=False, size=2)
@example(pieces=[*THOUGHT, "\n", "é", " ", CALL], which=2, has_tools=True, stops=(" <tool",), ended=False, size=99)
@example(pieces=["</think>", "word", "<think>"], which=3, has_tools=False, stops=(), ended=False, size=1)
@example(pieces=["word", "<think>", "word", "</think>", "x"], which=2, has_tools=True, stops=(), ended=True, size=3)
@given(
    pieces=st.lists(PIECES, max_size=9),
    which=st.integers(0, len(PARSERS) - 1),
    has_tools=st.booleans(),
    stops=st.sampled_from(
        [(), ("STOP",), ("word", "\n\n"), ("</tool_call>\n<tool_call>", "d<tool_call>\n<"), ("\nword", "</think>\n\n")]
    ),
    ended=st.booleans(),
    size=st.sampled_from([1, 3, 99]),
)
@settings(max_examples=160, deadline=None, suppress_health_check=list(HealthCheck))
async def test_what_is_shown_is_the_answers_beginning(
    renderer: Renderer,
    parsers: list[VllmParsers],
    pieces: list[str],
    which: int,
    has_tools: bool,
    stops: tuple[str, ...],
    ended: bool,
    size: int,
) -> None:
    """The ids come in chunks of `size`."""
    outputs = OutputParser(renderer, parsers[which])
    asked = request(TOOLS if has_tools else (), stops)
    plain = renderer.tokenizer.plain
    ids = [one for piece in pieces for one in plain.encode(piece, add_special_tokens=False).ids]
    output = await outputs.parse(outputs.decode(ids), asked, ended)
    live = live_answer(outputs, asked)
    shown = [live.released]
    streams = [(dialect.stream(asked.options), [b""]) for dialect in DIALECTS]
    for at in range(0, len(ids), size):
        live.feed(ids[at : at + size])
        shown.append(live.released)
        for stream, events in streams:
            events.append(stream.growth(7, live.released))
    for before, after in pairwise(shown):
        assert after.thinking.startswith(before.thinking) and after.text.startswith(before.text)
        assert after.begins(output.message), (pieces, after, output.message)
    outputs.check_live(live, output.message)
    assert not outputs.num_unlike_shown
    answer = Answer(7, output.message, output.finish, 1, len(ids))
    for dialect, (stream, events) in zip(DIALECTS, streams, strict=True):
        whole = b"".join([*events, stream.closing(answer)]).decode()
        data = [json.loads(line[6:]) for line in whole.split("\n") if line.startswith("data: {")]
        assert READ_STREAM[dialect.name](data) == READ_REPLY[dialect.name](json.loads(dialect.reply(OPTIONS, answer)))


async def test_thinking_and_text_are_shown_up_to_the_call(renderer: Renderer, parsers: list[VllmParsers]) -> None:
    """An implementation that shows nothing would be right in all other tests."""
    outputs = OutputParser(renderer, parsers[2])
    live = live_answer(outputs, request(TOOLS, ["STOP"]))
    text = f"<think>\nfirst a look\n</think>\n\nI call <b>it</b>.\n\n{CALL}"
    changed = live.changed()
    live.feed(renderer.tokenizer.plain.encode(text, add_special_tokens=False).ids)
    assert live.released == ("first a look", "I call <b>it</b>.") and changed.done()
    without = live_answer(OutputParser(renderer, parsers[0]), request((), ["STOP"]))
    without.feed(renderer.tokenizer.plain.encode("one  two ST", add_special_tokens=False).ids)
    assert without.released == ("", "one  two")


def arguments_in(events: list[Any]) -> list[str]:
    """Return the arguments of a stream's calls, by call, as far as the stream has them."""
    texts: dict[int, str] = {}
    for event in events:
        if event.get("delta", {}) and event["type"] == "response.function_call_arguments.delta":
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
        elif event.get("type") == "content_block_delta" and "partial_json" in event["delta"]:
            texts[event["index"]] = texts.get(event["index"], "") + event["delta"]["partial_json"]
        for choice in event.get("choices", []):
            for call in choice["delta"].get("tool_calls", []):
                texts[call["index"]] = texts.get(call["index"], "") + call["function"]["arguments"]
    return list(texts.values())


def data_of(events: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in events.decode().split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_every_call_comes_in_one_piece_at_the_end_of_the_stream(dialect: Any) -> None:
    """Some clients run a call as soon as its arguments are JSON, or as the next call begins."""
    calls = (ToolCall("call_1", "bash", {"command": "ls"}), ToolCall("call_2", "bash", {}))
    stream = dialect.stream(OPTIONS)
    events = stream.growth(7, ShownText("", "Look."))
    answer = Answer(7, Message("assistant", "Look.", "", calls), "tool_calls", 1, 1)
    data = data_of(events + stream.closing(answer))
    assert arguments_in(data) == ['{"command":"ls"}', "{}"]
    assert READ_STREAM[dialect.name](data) == READ_REPLY[dialect.name](json.loads(dialect.reply(OPTIONS, answer)))


def test_a_text_whose_logprobs_are_known_at_the_end_ends_before_a_call_begins() -> None:
    dialect = ResponsesDialect()
    options = replace(OPTIONS, dialect="responses", logprobs=True)
    call = ToolCall("call_1", "bash", {"command": "ls"})
    stream = dialect.stream(options)
    events = stream.growth(7, ShownText("", "Look."))
    message = Message("assistant", "Look.", "", (call,))
    answer = Answer(7, message, "tool_calls", 1, 1, logprobs=(TokenLogprob("Look.", -0.5),))
    assert read_responses_stream(data_of(events + stream.closing(answer)))[0]["content"][0]["logprobs"]


async def test_a_call_with_many_end_marks_is_read_with_the_whole_answer(
    renderer: Renderer, parsers: list[VllmParsers]
) -> None:
    """Neither it nor the calls around it are lost."""
    outputs = OutputParser(renderer, parsers[1])
    asked = request(TOOLS, ())
    many = CALL.replace("ls", "echo '" + "</tool_call>" * 40 + "'")
    text = f"Look.\n{CALL}\n{many}\n{CALLS[0]}\n{CALLS[2]}\n{CALL}"
    output = await outputs.parse(text, asked, True)
    assert [call.arguments["command"] for call in output.message.tool_calls] == [
        "ls",
        "echo '" + "</tool_call>" * 40 + "'",
        "echo '</tool_call>' {{}",
    ]


async def test_end_marks_that_end_no_call_cost_few_parses(renderer: Renderer, parsers: list[VllmParsers]) -> None:
    """A model may repeat one until its limit."""
    texts: list[str] = []

    class Counting(VllmParsers):
        def split_calls(self, body: str, tools: Any) -> Any:
            texts.append(body)
            return super().split_calls(body, tools)

    counting = Counting(renderer.model_path, "qwen3_coder", None)
    counting.load()
    outputs = OutputParser(renderer, counting)
    text = CALL + CALL[:40] + "</tool_call>" * 200
    assert (await outputs.parse(text, request(TOOLS, ()), False)).message.tool_calls
    assert len(texts) <= 12


async def test_an_answer_begins_again_only_if_nothing_was_shown(renderer: Renderer, parsers: list[VllmParsers]) -> None:
    encode = renderer.tokenizer.plain.encode
    live = live_answer(OutputParser(renderer, parsers[0]), request((), ["STOP"]))
    live.feed(encode("ST", add_special_tokens=False).ids)
    assert live.text == "" and live.begin_again()
    changed = live.changed()
    live.feed(encode("one two", add_special_tokens=False).ids)
    await changed
    assert live.text == "one two" and not live.begin_again()


async def test_nothing_behind_a_stop_token_is_shown(renderer: Renderer, parsers: list[VllmParsers]) -> None:
    """Also if it comes with the ids after it, or before them; a call without the token would be another one."""
    outputs = OutputParser(renderer, parsers[1])
    plain = renderer.tokenizer.plain
    ids = plain.encode("Look.\n" + CALL.replace("ls", "echo '<|im_end|>'"), add_special_tokens=False).ids
    stop = next(at for at, one in enumerate(ids) if one in renderer.stop_ids)
    for cuts in ((), (stop,), (stop + 1,), (stop, stop + 1)):
        live = live_answer(outputs, request(TOOLS, ()))
        for start, end in pairwise((0, *cuts, len(ids))):
            live.feed(ids[start:end])
        message = (await outputs.parse(renderer.tokenizer.decode(ids), request(TOOLS, ()), True)).message
        assert message.tool_calls and live.text == "Look." and live.released.begins(message), cuts


async def test_long_stop_sequences_take_little_memory(renderer: Renderer, parsers: list[VllmParsers]) -> None:
    """As many and as long as a request may have; the sandbox may send others with each request."""
    stops = [f"{number:03}" + "ab" * 498 + "end!" for number in range(MAX_STOPS - 1)] + ["word"]
    tracemalloc.start()
    live = live_answer(OutputParser(renderer, parsers[0]), request((), [one[:MAX_STOP_CHARS] for one in stops]))
    live.feed(renderer.tokenizer.plain.encode("text 005abab", add_special_tokens=False).ids)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10 << 20
    assert live.released == ("", "text")  # what may be a stop sequence is not shown


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "glm45", "kimi_k2"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("one</think>two <think> three", "one two three"),
        ("one <think> two</think>three", "one two three"),
        (" <think>one</think>\n\ntwo <think>three</think> four", "one two three four"),
        ("<think>one <think>two</think></think>three", "one two three"),
        ("</think>one\U000f0000<think>", "one"),
    ],
)
def test_a_later_mark_of_thinking_costs_no_text(model_dir: Path, name: str, text: str, words: str) -> None:
    parsers = VllmParsers(model_dir, None, name)
    parsers.load()
    found = parsers.split_thinking(text)
    assert [word for word in words.split() if word not in found.reasoning + found.body] == []
    marks = [(text.count(mark), (found.reasoning + found.body).count(mark)) for mark in ("<think>", "</think>")]
    assert all(before - after <= 1 for before, after in marks), "only the marks that separate are left out"
