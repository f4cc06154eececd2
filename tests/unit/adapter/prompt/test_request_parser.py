"""Repairs of histories: the order of tool results, and thinking that a client wrote into the text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from adapter.conversation import Message, ToolCall
from adapter.dialects.base import InvalidRequestError
from adapter.prompt.chat_template import ChatTemplate
from adapter.prompt.incremental_parser import IncrementalParser
from adapter.prompt.preamble_cache import PreambleCache
from adapter.prompt.prompt_builder import PreparedCall
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import HistoryRepairs
from adapter.turns.tree import TurnTree
from tests.unit.adapter.client import DIALECT, builder_of, new_session
from tests.unit.adapter.turns.test_tree import grow, ids


def call(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "bash", "input": {}}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": f"of {call_id}"}


NOTE: dict[str, Any] = {"type": "text", "text": "note"}


def body(*results: dict[str, Any], calls: str = "abc") -> bytes:
    answer = {"role": "assistant", "content": [call(one) for one in calls]}
    messages = [{"role": "user", "content": "go"}, answer]
    return orjson.dumps({"messages": [*messages, {"role": "user", "content": list(results)}] if results else messages})


@pytest.mark.parametrize("known", [False, True], ids=["the whole body", "the answer was parsed before"])
@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ([result("c"), result("a"), result("b")], ["of a", "of b", "of c"]),
        ([result("b"), result("c"), NOTE], ["of b", "of c", "note"]),
        ([result("c"), NOTE, result("a")], ["of a", "note", "of c"]),
        ([result("a"), result("b"), result("c")], ["of a", "of b", "of c"]),
    ],
)
def test_results_are_in_call_order(known: bool, sent: list[dict[str, Any]], seen: list[str]) -> None:
    parser = IncrementalParser(PreambleCache(), HistoryRepairs(orders_results=True))
    if known:
        parser.parse(body(), DIALECT, {})
    request = parser.parse(body(*sent), DIALECT, {})
    assert bool(request.num_skipped) is known
    assert [message.text for message in request.runs[-1].messages] == seen
    plain = IncrementalParser(PreambleCache()).parse(body(*sent), DIALECT, {})
    assert [message.text for message in plain.runs[-1].messages] == [one.get("content", "note") for one in sent]


def split(message: Message) -> Message:
    """Take thinking out of a text, as the parser of a model does."""
    thinking, mark, text = message.text.partition("</think>")
    return replace(message, text=text, reasoning=thinking.removeprefix("<think>")) if mark else message


@pytest.mark.parametrize(
    ("sent", "reasoning", "text"),
    [
        ("<think>more</think>Text.", "first", "<think>more</think>Text."),  # its own second block of thinking
        ("<think>only</think>Text.", "", "<think>only</think>Text."),  # an answer without reasoning, as it was sent
        ("<think>else</think>Text.", "else", "Text."),
        ("<think>first</think><think>more</think>Text.", "first", "<think>more</think>Text."),
    ],
)
def test_text_that_begins_with_thinking_is_split_only_if_it_is_no_answer_of_its_own(
    sent: str, reasoning: str, text: str
) -> None:
    tree = TurnTree()
    key = IncrementalParser(PreambleCache()).parse(question(), DIALECT, {}).keys[-1]
    grow(tree, 1, ids(1), ids(2), Message("assistant", "<think>more</think>Text.", "first"), key=key)
    grow(tree, 2, ids(1), ids(3), Message("assistant", "<think>only</think>Text."), key=key)
    repairs = HistoryRepairs(tree.with_reasoning, split=split, knows=tree.knows)
    answer = {"role": "assistant", "content": [{"type": "text", "text": sent}]}
    request = IncrementalParser(PreambleCache(), repairs).parse(question(answer), DIALECT, {})
    (message,) = request.runs[1].messages
    assert (message.reasoning, message.text) == (reasoning, text)


@pytest.mark.parametrize("thinking", ["I look.", "I look.  Then", "another"])
def test_thinking_in_the_text_of_a_known_call_stands_in_the_prompt_once(thinking: str) -> None:
    """The id of the call says which answer it is, not that its text is as it was."""
    tree = TurnTree()
    key = IncrementalParser(PreambleCache()).parse(question(), DIALECT, {}).keys[-1]
    call_of_it = ToolCall("c1", "bash", {"a": 1})
    grow(tree, 1, ids(1), ids(2), Message("assistant", "ok", "I look.  Then I run it. ", (call_of_it,)), key=key)
    repairs = HistoryRepairs(tree.with_reasoning, split=split, knows=tree.knows)
    blocks = [{"type": "text", "text": f"<think>{thinking}</think>ok"}, call("c1") | {"input": {"a": 1}}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r"}]}
    request = IncrementalParser(PreambleCache(), repairs).parse(
        question({"role": "assistant", "content": blocks}, result), DIALECT, {}
    )
    (message,) = request.runs[1].messages
    assert (message.reasoning, message.text) == (thinking, "ok")


def question(*later: dict[str, Any]) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": "go"}, *later]})


async def prepare(renderer: Renderer, *sent: dict[str, Any]) -> PreparedCall:
    return await builder_of(renderer).prepare(new_session(), body(*sent), DIALECT, {})


async def test_the_order_of_the_results_changes_nothing(renderer: Renderer) -> None:
    one = await prepare(renderer, result("a"), result("b"), result("c"))
    other = await prepare(renderer, result("c"), result("a"), result("b"))
    assert one.digest == other.digest and one.ids.tolist() == other.ids.tolist()


@pytest.mark.parametrize("sent", [[result("b"), result("x")], [result("b"), result("b"), result("a")]])
async def test_results_that_are_not_of_the_calls_are_refused(renderer: Renderer, sent: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequestError, match=r"no corresponding|two results"):
        await prepare(renderer, *sent)


def test_a_template_that_shows_ids_keeps_the_order_of_the_agent(renderer: Renderer, tmp_path: Path) -> None:
    assert not renderer.template.shows_call_ids
    (tmp_path / "chat_template.jinja").write_text(
        "{% for one in messages %}{{ one.tool_call_id }}{{ one.content }}{% endfor %}"
    )
    assert ChatTemplate(tmp_path, {}, {}).shows_call_ids
