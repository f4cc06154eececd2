"""Results of parallel tool calls in the order of the calls, for a template that shows no ids."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from adapter.dialects.base import InvalidRequestError
from adapter.prompt.chat_template import ChatTemplate
from adapter.prompt.incremental_parser import IncrementalParser
from adapter.prompt.preamble_cache import PreambleCache
from adapter.prompt.prompt_builder import PreparedCall
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import HistoryRepairs
from tests.unit.adapter.client import DIALECT, builder_of, new_session


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
