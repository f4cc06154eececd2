"""Templates of other models, whose histories are not the sum of their segments: sampled ids stay in the prompts.

The templates are those that TRL ships, with the stop tokens of their models; the tokenizer is made for the test.
"""

import json
import random
import re
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from adapter.conversation import Message, ToolCall
from adapter.prompt.prompt_builder import PreparedCall
from adapter.prompt.renderer import Renderer
from adapter.turns.tree import TurnGrowth
from ratchet.store.arrays import Ids
from ratchet.types import ForkCause
from tests.standins.tiny_model import make_tokenizer
from tests.unit.adapter.client import DIALECT, Client, WireMessage

# Each template with its model's stop tokens: of an answer, of a tool call.
STOPS = {
    "gptoss": ("<|return|>", "<|call|>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "deepseekv3": ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma4_v5": ("<turn|>", "<|tool_response>"),
    "phi3_5": ("<|end|>", "<|end|>"),
}
EACH = pytest.mark.parametrize("name", list(STOPS))
CONTROL = re.compile(r"<\|[a-zA-Z_]+\|>|<｜[^｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[gMASK\]|<sop>|</?tool_[a-z]+>|</?think>")


@dataclass
class Models:
    """Renderers by template, each made once."""

    directory: Path
    known: dict[str, Renderer] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Renderer:
        if name not in self.known:
            self.known[name] = make_renderer(self.directory / name, name)
        return self.known[name]


def make_renderer(directory: Path, name: str) -> Renderer:
    text = (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    make_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    controls = dict.fromkeys([*CONTROL.findall(text), *STOPS[name]])
    new = [one for one in controls if tokenizer.token_to_id(one) is None]
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in new])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(text)
    stops = [tokenizer.token_to_id(one) for one in dict.fromkeys(STOPS[name])]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Renderer(directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("templates"))


class Agent(Client):
    """A client whose answers alternate between tool calls and text, sampled letter by letter."""

    def __init__(self, renderer: Renderer, name: str, seed: int = 0) -> None:
        super().__init__(renderer, seed)
        self.stops = STOPS[name]
        self.has_tools = name != "phi3_5"
        self.tools = self.tools if self.has_tools else []
        self.reasoning = ""

    async def ask(self) -> PreparedCall:
        return await self.builder.prepare(self.session, self.body(), DIALECT, {})

    def sample(self, prepared: PreparedCall, text: str | None = None, stop: str | None = None) -> WireMessage:
        """Answer with the given text, or with a call or a text of its own."""
        self.number += 1
        calls: tuple[ToolCall, ...] = ()
        if text is None and self.has_tools and self.number % 3:
            calls = (ToolCall(f"c{self.number}", "bash", {"a": "ls é"}),)
        shown = f"answer {self.number}" if text is None else text
        plain = self.renderer.tokenizer.plain
        letters = [one for letter in shown for one in plain.encode(letter, add_special_tokens=False).ids]
        end = plain.token_to_id(stop or self.stops[1 if calls else 0])
        sampled = np.array([*letters, end], np.int32)
        message = Message("assistant", shown, self.reasoning, calls)
        growth = TurnGrowth(prepared.new_keys, message, "", prepared.kind, self.renderer.ended(sampled), False)
        self.session.tree.add(self.number, prepared.attach_point, prepared.stream, sampled, growth)
        answer = WireMessage("assistant", (message,), sampled)
        self.history += [answer, *self.results(message)]
        return answer

    def results(self, message: Message) -> list[WireMessage]:
        if not message.tool_calls:
            return [WireMessage("user", (Message("user", f" follow{self.number} {self.text()}"),))]
        parts = [
            Message("tool", f"{self.text()} follow{self.number}", tool_call_id=call.id) for call in message.tool_calls
        ]
        return [WireMessage("user", tuple(parts))]

    def full(self, prepared: PreparedCall) -> Ids:
        return self.renderer.full(prepared.request.preamble, prepared.request.runs)


@EACH
@pytest.mark.parametrize("seed", range(5))
async def test_prompts_begin_with_what_was_sampled(models: Models, name: str, seed: int) -> None:
    """Each prompt is the stored stream and the end of the full text; no turn forks."""
    assert models[name].full_render_reason is not None
    agent = Agent(models[name], name, seed)
    for _ in range(8):
        prepared = await agent.ask()
        assert prepared.fork_cause is (None if agent.number else ForkCause.ROOT)
        stream = agent.session.tree.stream(agent.number) if agent.number else np.zeros(0, np.int32)
        assert np.array_equal(prepared.ids[: len(stream)], stream)
        tail = prepared.ids[len(stream) :]
        full = agent.full(prepared)
        assert 0 < len(tail) <= len(full) and np.array_equal(tail, full[len(full) - len(tail) :])
        assert agent.number == 0 or f"follow{agent.number}" in agent.renderer.tokenizer.decode(tail)
        agent.sample(prepared)


@pytest.mark.parametrize("name", ["glm4moe", "gemma4", "phi3_5"])
async def test_what_the_template_shows_as_sampled_is_the_full_text(models: Models, name: str) -> None:
    """If the model samples exactly what the template shows of an answer, the prompt is that of rendering everything.

    What the template shows is taken from full renders: the part of the next prompt between the last one and the stop.
    """
    agent = Agent(models[name], name)
    tokenizer = agent.renderer.tokenizer
    for number in range(4):
        prepared = await agent.ask()
        before = tokenizer.decode(agent.full(prepared))
        assert tokenizer.decode(prepared.ids) == before
        probe = replace(agent.history[-1], role="assistant", parts=(Message("assistant", f"word {number}"),))
        agent.history += [probe, WireMessage("user", (Message("user", "x"),))]
        after = tokenizer.decode(agent.full(await agent.ask()))
        del agent.history[-2:]
        assert after.startswith(before)
        shown = after[len(before) :].partition(agent.stops[0])[0]
        message = agent.sample(prepared, text=shown).parts[0]
        agent.history[-2] = WireMessage("assistant", (replace(message, text=f"word {number}"),))
        stored = agent.session.tree
        growth = TurnGrowth(prepared.new_keys, agent.history[-2].parts[0], "", prepared.kind, True, False)
        stored._index(agent.number, growth)


@pytest.mark.parametrize("name", ["glm4moe", "gemma4"])
async def test_dropped_thinking_is_named(models: Models, name: str) -> None:
    """A new question makes the template leave thinking out: the prompt is the full text, and the cause is known."""
    agent = Agent(models[name], name)
    agent.reasoning = "a thought"
    agent.sample(await agent.ask())
    prepared = await agent.ask()
    assert prepared.fork_cause is None
    agent.history[-1] = WireMessage("user", (*agent.history[-1].parts, Message("user", "and?")))
    agent.history.append(WireMessage("user", (Message("user", "a new question"),)))
    prepared = await agent.ask()
    assert prepared.fork_cause is ForkCause.THINKING and np.array_equal(prepared.ids, agent.full(prepared))


@EACH
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
    if name == "phi3_5":
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
