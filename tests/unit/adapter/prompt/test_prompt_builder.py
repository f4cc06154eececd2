"""Prompt ids of randomly simulated clients equal the oracle's, token for token: the property that the training data
depends on.

About 3,000 histories with each of two templates, and with a tokenizer that begins a text with a blank.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.conversation import Message, MessageRun, ToolCall
from adapter.prompt.prompt_builder import PreparedCall
from adapter.prompt.renderer import Renderer
from ratchet.types import ForkCause
from tests.standins.family_tokenizers import make_family_tokenizer
from tests.standins.tiny_model import ADDED, SPECIAL, TEMPLATE, make_tokenizer
from tests.unit.adapter.client import DIALECT, Client, new_session

KEEPING = TEMPLATE.replace(
    "and loop.index0 > ns.last_query", "and (preserve_thinking is defined and preserve_thinking)"
)
OPENED = TEMPLATE.replace(
    "'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)

CUTTING = TEMPLATE.replace(
    "{{- message.content or '' }}",
    "{{- message.content.split('[/thought]')[-1] if loop.index0 <= ns.last_query else message.content }}",
)
"""A later question cuts an answer's text, in which the template itself looks for thinking."""

NOTING = "{%- for one in messages %}{%- if '§' in one.content %}NOTE {% endif %}{%- endfor %}" + TEMPLATE
"""A message with this sign changes the text before it; the check at start does not try it."""


def renderer_of(directory: Path, template: str) -> Renderer:
    make_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    return Renderer(directory)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    templates = {"drops thinking": TEMPLATE, "keeps thinking": KEEPING}
    found = {name: renderer_of(tmp_path_factory.mktemp("model"), text) for name, text in templates.items()}
    directory = tmp_path_factory.mktemp("metaspace")
    make_family_tokenizer(directory, "metaspace", [*SPECIAL, *ADDED], ["<|im_end|>", "<|endoftext|>"])
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return found | {"begins with a blank": Renderer(directory)}


@pytest.mark.parametrize("name", ["drops thinking", "keeps thinking", "begins with a blank"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
async def test_every_prompt_equals_the_oracles(renderers: dict[str, Renderer], name: str, seed: int) -> None:
    client = Client(renderers[name], seed)
    assert renderers[name].full_render_reason is None
    for _ in range(12):
        prepared = await client.ask()
        assert np.array_equal(prepared.ids, client.expected()), client.history
        client.go_on(client.sample(prepared))


@pytest.mark.parametrize("template", [TEMPLATE, OPENED, CUTTING])
def test_a_plain_answer_thinks_if_a_later_question_changes_its_text(tmp_path: Path, template: str) -> None:
    """The trial made once per template holds for each answer: with marks in its text, with calls, with white space."""
    renderer = renderer_of(tmp_path, template)
    segments = renderer.segments
    assert segments is not None
    call = ToolCall("call00001", "f", {"command": "[/thought]"})
    texts = ["", "plain", " \n edges \n", "a[/thought]b", "a</think>b", *renderer.template.marks]
    changed = set()
    for text, reasoning, calls in product(texts, ("", "r"), ((), (call,), (call, call))):
        answer = Message("assistant", text, reasoning, calls)
        differs = segments.drops_thinking and segments.answer(answer, True) != segments.answer(answer, False)
        assert segments.thinks(answer) == differs, answer
        if differs and not reasoning:
            changed.add(text)
    assert changed >= ({"a[/thought]b"} if template == CUTTING else set())


class ForgetfulClient(Client):
    """A client that sends no reasoning back; an answer without calls that it edits has none any more.

    The id of a call says which answer it was, so an edited answer with calls keeps its reasoning.
    """

    def __init__(self, renderer: Renderer, seed: int) -> None:
        super().__init__(renderer, seed)
        self.session = new_session(restores=True)
        self.sends_reasoning = False

    def edit(self, at: int) -> None:
        super().edit(at)
        message = self.history[at]
        self.history[at] = replace(message, parts=tuple(map(_forgotten, message.parts)))


def _forgotten(answer: Message) -> Message:
    return answer if answer.tool_calls else replace(answer, reasoning="")


@pytest.mark.parametrize("name", ["drops thinking", "keeps thinking"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
async def test_a_client_that_sends_no_reasoning_gets_the_prompts_of_one_that_does(
    renderers: dict[str, Renderer], name: str, seed: int
) -> None:
    client = ForgetfulClient(renderers[name], seed)
    for _ in range(12):
        prepared = await client.ask()
        assert np.array_equal(prepared.ids, client.expected()), client.history
        client.go_on(client.sample(prepared))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
async def test_another_process_makes_the_same_prompts(renderers: dict[str, Renderer], seed: int) -> None:
    """A process without parsed bytes of earlier requests, with a tree that was filled turn by turn."""
    client = Client(renderers["drops thinking"], seed)
    for _ in range(8):
        prepared = await client.ask()
        fresh = new_session()
        fresh.tree = client.session.tree
        again = await client.builder.prepare(fresh, client.body(), DIALECT, _headers_of(prepared))
        assert np.array_equal(prepared.ids, again.ids) and prepared.digest == again.digest
        client.go_on(client.sample(prepared))


def _headers_of(prepared: PreparedCall) -> dict[str, str]:
    return {"x-claude-code-agent-id": prepared.lane} if prepared.lane else {}


async def test_streams_are_stored_as_they_were_sampled(renderers: dict[str, Renderer]) -> None:
    """The tree stores what the engine saw: the prompt of each turn, then its sample."""
    client = Client(renderers["drops thinking"], 7)
    seen = []
    for _ in range(30):
        prepared = await client.ask()
        answer = client.sample(prepared)
        seen.append((client.number, np.concatenate([prepared.ids, answer.ids])))
        client.go_on(answer)
    for turn_id, stream in seen:
        assert np.array_equal(client.session.tree.stream(turn_id), stream)


async def test_the_oracle_notices(renderers: dict[str, Renderer]) -> None:
    """A control: an oracle that lacks one sample disagrees."""
    client = Client(renderers["keeps thinking"], 3)
    client.go_on = lambda answer: client.history.extend([answer, *client.after(answer)])  # type: ignore[method-assign]
    for _ in range(3):
        client.go_on(client.sample(await client.ask()))
    prepared = await client.ask()
    assert np.array_equal(prepared.ids, client.expected())
    client.history[1] = type(client.history[1])("assistant", client.history[1].parts, None)
    assert not np.array_equal(prepared.ids, client.expected())


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (TEMPLATE.replace("{%- if tools %}", "{{- strftime_now('%d') }}{%- if tools %}"), "clock"),
        (TEMPLATE + "{{- messages | length }}", "changes with what follows"),
        (
            TEMPLATE.replace(
                "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'",
                "{{- 'END' }}\n    {%- elif message.role == 'tool'",
            ),
            "token of its own",
        ),
    ],
)
async def test_a_template_that_is_not_the_sum_of_its_segments_is_rendered_in_full(
    tmp_path: Path, template: str, why: str
) -> None:
    """The text behind a stored stream is the end of the full text; without a token behind answers, all is full text."""
    renderer = renderer_of(tmp_path, template)
    assert renderer.full_render_reason is not None and why in renderer.full_render_reason
    client = Client(renderer, 1)
    client.history = [client.question()]
    client.thoughts = [""]
    for _ in range(4):
        prepared = await client.builder.prepare(client.session, client.body(), DIALECT, {})
        full = renderer.full(prepared.request.preamble, prepared.request.runs)
        stream = client.session.tree.stream(client.number) if client.number and "END" not in template else full[:0]
        assert prepared.request.num_skipped == 0 and np.array_equal(prepared.ids[: len(stream)], stream)
        tail = prepared.ids[len(stream) :]
        assert np.array_equal(tail, full[len(full) - len(tail) :])
        assert client.number == 0 or "END" not in template or prepared.fork_cause is ForkCause.DRIFT
        answer = client.sample(prepared)
        client.history += [answer, *client.after(answer)]


@pytest.mark.parametrize("thought", ["", "thought {}"])
async def test_a_history_that_cannot_be_rendered_in_segments_is_rendered_in_full(tmp_path: Path, thought: str) -> None:
    """The runs that were parsed with earlier requests are parsed again, so that the prompt has them."""
    renderer = renderer_of(tmp_path, NOTING)
    assert renderer.full_render_reason is None
    client = Client(renderer, 1)
    client.thoughts = [thought]
    for _ in range(4):
        answer = client.sample(await client.ask())
        client.history += [answer, *client.after(answer)]
    last = client.history[-1]
    client.history[-1] = replace(last, parts=(*last.parts[:-1], replace(last.parts[-1], text="§")))
    prepared = await client.ask()
    parts = [part for message in client.history for part in message.parts]
    full = renderer.full(prepared.request.preamble, [MessageRun.of([part]) for part in parts])
    assert np.array_equal(prepared.ids, full)


def test_an_answer_that_cannot_be_rendered_in_segments_may_lose_its_thinking(tmp_path: Path) -> None:
    """Otherwise the sample, which is complete, would fail."""
    assert renderer_of(tmp_path, NOTING).thinks(Message("assistant", "§", "thought"))


async def test_a_generation_prompt_that_the_template_omits_later_is_kept_in_the_stream(tmp_path: Path) -> None:
    """Qwen3 without thinking writes an empty block before each answer and omits it later.

    The stream keeps it and never forks.
    """
    renderer = renderer_of(tmp_path, OPENED)
    assert renderer.full_render_reason is None
    client = Client(renderer, 1)
    client.thoughts = [""]
    for _ in range(6):
        prepared = await client.ask()
        answer = client.sample(prepared)
        client.history += [answer, *client.after(answer)]
    extends = {
        client.session.tree.nodes[one].kept_tokens == client.session.tree.nodes[one - 1].length for one in range(2, 7)
    }
    assert extends == {True}


def test_dropped_thinking_beside_a_tool_result_is_kept(renderers: dict[str, Renderer]) -> None:
    template = renderers["drops thinking"].template
    history = [Message("user", "q"), Message("assistant", "a", "thought"), Message("tool", "r")]
    assert "thought" in template.render([*history, Message("user", "note", beside_tool=True)])
    assert "thought" not in template.render([*history, Message("user", "question")])
    assert renderers["keeps thinking"].template.kwargs == {"preserve_thinking": True}
    assert "thought" in renderers["keeps thinking"].template.render([*history, Message("user", "question")])
