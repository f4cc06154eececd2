"""Prompt ids over random lives of clients: equal to the oracle, token for token, whatever the clients do.

Why here: this is the property that the training data stands on.
Called by: pytest. About 3,000 histories in each of two templates.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.prompt.renderer import Renderer
from tests.standins.tiny_model import TEMPLATE, make_tokenizer
from tests.unit.adapter.client import Client, new_live

KEEPING = TEMPLATE.replace(
    "and loop.index0 > ns.last_query", "and (preserve_thinking is defined and preserve_thinking)"
)
OPENED = TEMPLATE.replace(
    "'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


def renderer_of(directory: Path, template: str) -> Renderer:
    make_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    return Renderer(directory)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    templates = {"drops thinking": TEMPLATE, "keeps thinking": KEEPING}
    return {name: renderer_of(tmp_path_factory.mktemp("model"), text) for name, text in templates.items()}


@pytest.mark.parametrize("name", ["drops thinking", "keeps thinking"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
async def test_every_prompt_is_the_oracles(renderers: dict[str, Renderer], name: str, seed: int) -> None:
    client = Client(renderers[name], seed)
    assert renderers[name].full_because is None
    for _ in range(12):
        prepared = await client.ask()
        assert np.array_equal(prepared.ids, client.expected()), client.history
        client.go_on(client.sample(prepared))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
async def test_another_process_makes_the_same_prompts(renderers: dict[str, Renderer], seed: int) -> None:
    """Without anything remembered of earlier bytes, and with a tree that was filled turn by turn."""
    client = Client(renderers["drops thinking"], seed)
    for _ in range(8):
        prepared = await client.ask()
        fresh = new_live()
        fresh.tree = client.live.tree
        again = await client.prompts.prepare(fresh, client.body(), *_call_of(prepared))
        assert np.array_equal(prepared.ids, again.ids) and prepared.digest == again.digest
        client.go_on(client.sample(prepared))


def _call_of(prepared: object) -> tuple[object, dict[str, str]]:
    from tests.unit.adapter.client import DIALECT

    lane = prepared.lane  # type: ignore[attr-defined]
    return DIALECT, {"x-claude-code-agent-id": lane} if lane else {}


async def test_streams_stand_as_they_were_sampled(renderers: dict[str, Renderer]) -> None:
    """What the tree stores is what the engine saw: the prompt of each turn, then its sample."""
    client = Client(renderers["drops thinking"], 7)
    seen = []
    for _ in range(30):
        prepared = await client.ask()
        answer = client.sample(prepared)
        seen.append((client.number, np.concatenate([prepared.ids, answer.ids])))
        client.go_on(answer)
    for turn_id, stream in seen:
        assert np.array_equal(client.live.tree.stream(turn_id), stream)


async def test_the_oracle_notices(renderers: dict[str, Renderer]) -> None:
    """A control: an oracle that forgot one sample, or one edit, disagrees."""
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
async def test_a_template_that_is_not_made_of_parts_is_rendered_in_full(
    tmp_path: Path, template: str, why: str
) -> None:
    renderer = renderer_of(tmp_path, template)
    assert renderer.full_because is not None and why in renderer.full_because
    client = Client(renderer, 1)
    client.history = [client.question()]
    for _ in range(4):
        prepared = await client.ask()
        full = renderer.full(prepared.reading.head, prepared.reading.units)
        assert prepared.reading.num_skipped == 0 and np.array_equal(prepared.ids, full)
        answer = client.sample(prepared)
        client.history += [answer, *client.after(answer)]


async def test_a_generation_prompt_that_the_template_forgets_stands_as_it_was(tmp_path: Path) -> None:
    """Qwen3 without thinking writes an empty block before each answer and leaves it out later: the stream keeps it, and never forks."""
    renderer = renderer_of(tmp_path, OPENED)
    assert renderer.full_because is None
    client = Client(renderer, 1)
    client.thoughts = [""]
    for _ in range(6):
        prepared = await client.ask()
        answer = client.sample(prepared)
        client.history += [answer, *client.after(answer)]
    causes = {client.live.tree.nodes[one].kept_tokens == client.live.tree.nodes[one - 1].length for one in range(2, 7)}
    assert causes == {True}


def test_dropped_thinking_beside_a_tool_result_is_kept(renderers: dict[str, Renderer]) -> None:
    from adapter.conversation import Message

    template = renderers["drops thinking"].template
    history = [Message("user", "q"), Message("assistant", "a", "thought"), Message("tool", "r")]
    assert "thought" in template.render([*history, Message("user", "note", beside_tool=True)])
    assert "thought" not in template.render([*history, Message("user", "question")])
    assert renderers["keeps thinking"].template.kwargs == {"preserve_thinking": True}
    assert "thought" in renderers["keeps thinking"].template.render([*history, Message("user", "question")])
