"""Templates of other models, whose histories are not the sum of their segments: sampled ids stay in the prompts.

Templates and tokenizers are in `tests/unit/adapter/families.py`; `test_families.py` has what holds for all templates.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from adapter.conversation import Message, ToolCall
from adapter.prompt.renderer import Renderer
from adapter.turns.tree import TurnGrowth
from ratchet.types import ForkCause
from tests.unit.adapter.client import WireMessage
from tests.unit.adapter.families import FAMILIES, Agent, Models, make_renderer

FULL = [name for name, family in FAMILIES.items() if not family.in_parts]
EACH = pytest.mark.parametrize("name", FULL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("templates"))


@pytest.mark.parametrize("name", ["glm4moe", "gemma4", "phi3_5"])
async def test_what_the_template_shows_as_sampled_is_the_full_text(models: Models, name: str) -> None:
    """If the model samples exactly what the template shows of an answer, the prompt is that of rendering everything.

    What the template shows is taken from full renders: the part of the next prompt between the last one and the stop.
    """
    agent = Agent(models[name], name)
    tokenizer = agent.renderer.tokenizer
    for number in range(4):
        prepared = await agent.ask()
        before = tokenizer.decode(agent.full())
        assert tokenizer.decode(prepared.ids) == before
        probe = replace(agent.history[-1], role="assistant", parts=(Message("assistant", f"word {number}"),))
        agent.history += [probe, WireMessage("user", (Message("user", "x"),))]
        after = tokenizer.decode(agent.full())
        del agent.history[-2:]
        assert after.startswith(before)
        shown = after[len(before) :].partition(agent.stops[0])[0]
        message = agent.sample(prepared, text=shown).parts[0]
        agent.history[-2] = WireMessage("assistant", (replace(message, text=f"word {number}"),))
        stored = agent.session.tree
        loose_key = prepared.request.loose_keys[-1]
        growth = TurnGrowth(prepared.new_keys, agent.history[-2].parts[0], "", prepared.kind, True, False, loose_key)
        stored._index(agent.number, growth)


@pytest.mark.parametrize("name", ["glm4moe", "gemma4"])
async def test_dropped_thinking_is_named(models: Models, name: str) -> None:
    """A new question makes the template leave thinking out: the prompt is the full text, and the cause is known."""
    agent = Agent(models[name], name)
    agent.reasoning = "a thought"
    agent.sample(await agent.ask())
    prepared = await agent.ask()
    assert prepared.fork_cause is None
    agent.history[-1] = WireMessage("user", (*agent.history[-1].parts, Message("user", "and?", beside_tool=True)))
    agent.history.append(WireMessage("user", (Message("user", "a new question"),)))
    prepared = await agent.ask()
    assert prepared.fork_cause is ForkCause.THINKING and np.array_equal(prepared.ids, agent.full())


@pytest.mark.parametrize("name", [name for name in FULL if not FAMILIES[name].moves_tools])
async def test_another_end_is_kept_and_the_boundary_follows(models: Models, name: str) -> None:
    """An answer that was cut at the token limit, or that ended with another stop token."""
    agent = Agent(models[name], name)
    agent.sample(await agent.ask(), text="cut", stop="<|im_start|>")
    prepared = await agent.ask()
    stream = agent.session.tree.stream(1)
    assert np.array_equal(prepared.ids[: len(stream)], stream) and prepared.fork_cause is ForkCause.STOP
    assert int(prepared.ids[len(stream)]) in agent.renderer._tails.boundary_ids


@EACH
async def test_an_edit_is_named_edit(models: Models, name: str) -> None:
    agent = Agent(models[name], name)
    for _ in range(3):
        agent.sample(await agent.ask())
    agent.history[0] = WireMessage("user", (Message("user", "changed"),))
    prepared = await agent.ask()
    assert prepared.fork_cause in (ForkCause.EDIT, ForkCause.ROOT)


@EACH
async def test_tool_calls_are_rendered_with_the_arguments_that_the_template_takes(models: Models, name: str) -> None:
    """DeepSeek's templates take arguments as text, and R1's shows a call only without a text beside it."""
    if not FAMILIES[name].has_tools:
        pytest.skip("this template has no tools")
    call = ToolCall("c1", "bash", {"a": "zqxargument"})
    messages = [Message("user", "q"), Message("assistant", "", tool_calls=(call,))]
    text = models[name].template.render([*messages, Message("tool", "r", tool_call_id="c1")])
    assert "zqxargument" in text and "bash" in text and "None" not in text


async def test_random_texts_stay_behind_the_stream(models: Models) -> None:
    """Texts that contain control tokens, nonces and line ends, through the template with role openings as stops."""
    agent = Agent(models["glm4moe"], "glm4moe", 3)
    rng = random.Random(1)
    for _ in range(20):
        prepared = await agent.ask()
        assert prepared.fork_cause in (None, ForkCause.ROOT)
        agent.sample(prepared, text=None if rng.random() < 0.5 else f"{agent.number} <|user|> \n{agent.text()}x")


def with_clock(directory: Path, name: str, **variables: object) -> Renderer:
    """A family whose template reads the clock, so that its text is rendered in full."""
    make_renderer(directory, name)
    template = directory / "chat_template.jinja"
    template.write_text("{%- set now = strftime_now('%Y') %}" + template.read_text())
    renderer = Renderer(directory, variables)
    assert renderer.full_render_reason == "it reads the clock"
    return renderer


class TwoWays(NamedTuple):
    """Renderers of one family's template, in full and in parts."""

    name: str
    in_full: Renderer
    in_parts: Renderer


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", {}),  # it shows an empty thinking of an answer without any, if nothing follows
        ("qwen3", {"enable_thinking": False}),
        ("qwen3_5_think", {}),  # it shows an empty thinking until a question
        ("nemotron_3_nano", {}),
        ("minimax_m2", {}),
    ],
    ids=lambda param: " ".join([param[0], *param[1]]),
)
def two_ways(tmp_path_factory: pytest.TempPathFactory, models: Models, request: pytest.FixtureRequest) -> TwoWays:
    name, variables = request.param
    in_full = with_clock(tmp_path_factory.mktemp("clock"), name, **variables)
    return TwoWays(name, in_full, Renderer(models[name].model_path, variables) if variables else models[name])


@pytest.mark.parametrize("thinks", [(), (1,), (1, 3), (2,)])
async def test_in_full_the_same_turns_fork_as_in_parts(two_ways: TwoWays, thinks: tuple[int, ...]) -> None:
    """Calls, then an answer that a question follows, with thinking in some answers."""
    in_full = Agent(two_ways.in_full, two_ways.name, seed=7)
    in_parts = Agent(two_ways.in_parts, two_ways.name, seed=7)
    for number in range(1, 8):
        causes = []
        for agent in (in_full, in_parts):
            agent.reasoning = "a thought" if number in thinks else ""
            prepared = await agent.ask()
            causes.append(prepared.fork_cause)
            agent.sample(prepared)
        assert causes[0] is causes[1], number


async def test_a_template_that_cuts_thinking_from_a_text_drops_thinking(tmp_path: Path) -> None:
    """Without a parser of thinking, thinking is in the text, and some templates look there for its end."""
    make_renderer(tmp_path, "qwen2_5")
    text = (
        "{%- set ns = namespace(question=-1, now=strftime_now('%Y')) %}"
        "{%- for one in messages %}{%- if one.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}"
        "{%- endfor %}{%- for one in messages %}<|im_start|>{{ one.role }}\n"
        "{{ one.content.split('</think>')[-1] if loop.index0 < ns.question else one.content }}<|im_end|>\n"
        "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(text)
    agent = Agent(Renderer(tmp_path), "qwen2_5", seed=7)
    assert not agent.renderer.template.shows_reasoning
    agent.sample(await agent.ask(), text="a thought</think>done")
    prepared = await agent.ask()
    assert prepared.fork_cause is ForkCause.THINKING and np.array_equal(prepared.ids, agent.full())
