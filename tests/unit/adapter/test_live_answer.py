"""What is shown of an answer is its beginning, for any output and any parsers.

vLLM's parsers are imported once for this file (about 13 CPU seconds).
"""

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.conversation import Preamble, RequestOptions
from adapter.dialects.base import MAX_STOP_CHARS, MAX_STOPS
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
PIECES = st.sampled_from(
    [
        "<think>", "</think>", "\n", " ", "  \n", "word", "Look <b>", CALL, CALL[:40], "<tool_call>", "</tool_call>",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "<function=bash>", "STOP", "ST",
        "\U0001f600", "é", "<", "[bash(command='ls')]", "</thin", "<|im_start|>",
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


def request(tools: Sequence[Any], stops: Sequence[str]) -> ParsedRequest:
    options = RequestOptions(dialect="chat", stream=True, stop_sequences=tuple(stops))
    return ParsedRequest(options=options, preamble=Preamble.of("", tools), runs=[], keys=[], num_skipped=0)


def live_answer(outputs: OutputParser, asked: ParsedRequest) -> LiveAnswer:
    found = outputs.live_answer(asked)
    assert found is not None
    return found


@given(
    pieces=st.lists(PIECES, max_size=9),
    which=st.integers(0, len(PARSERS) - 1),
    has_tools=st.booleans(),
    stops=st.sampled_from([(), ("STOP",), ("word", "\n\n")]),
    ended=st.booleans(),
)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
async def test_what_is_shown_is_the_answers_beginning(
    renderer: Renderer,
    parsers: list[VllmParsers],
    pieces: list[str],
    which: int,
    has_tools: bool,
    stops: tuple[str, ...],
    ended: bool,
) -> None:
    outputs = OutputParser(renderer, parsers[which])
    asked = request(TOOLS if has_tools else (), stops)
    plain = renderer.tokenizer.plain
    ids = [one for piece in pieces for one in plain.encode(piece, add_special_tokens=False).ids]
    final = (await outputs.parse(outputs.decode(ids), asked, ended)).message
    live = live_answer(outputs, asked)
    shown = [live.released]
    for one in ids:
        live.feed([one])
        if live._timer is not None:  # the next update, without its delay
            live._timer.cancel()
            live._show()
        shown.append(live.released)
    for before, after in pairwise(shown):
        assert after.thinking.startswith(before.thinking) and after.text.startswith(before.text)
        assert after.begins(final), (pieces, after, final)


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


async def test_an_answer_begins_again_only_if_nothing_was_shown(renderer: Renderer, parsers: list[VllmParsers]) -> None:
    encode = renderer.tokenizer.plain.encode
    live = live_answer(OutputParser(renderer, parsers[0]), request((), ["STOP"]))
    live.feed(encode("ST", add_special_tokens=False).ids)
    assert live.text == "" and live.begin_again()
    changed = live.changed()
    live.feed(encode("one two", add_special_tokens=False).ids)
    await changed
    assert live.text == "one two" and not live.begin_again()


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
