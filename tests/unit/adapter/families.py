"""Chat templates of the families that people train, each with a tokenizer of its family's kind, and a client for them.

Templates are those that TRL ships; of a family without one there, a template is in `tests/standins/chat_templates/`,
written after the published format. The models' tokenizers cannot be had here.
"""

import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import numpy as np

from adapter.conversation import Message, ToolCall
from adapter.prompt.prompt_builder import PreparedCall
from adapter.prompt.renderer import Renderer
from adapter.turns.tree import TurnGrowth
from store.arrays import Ids
from tests.standins.family_tokenizers import Kind, ids_of_letters, make_family_tokenizer
from tests.unit.adapter.client import DIALECT, Client, WireMessage

OWN_TEMPLATES = Path(__file__).parents[2] / "standins" / "chat_templates"
CONTROL = re.compile(
    r"<\|[a-zA-Z0-9_]+\|>|<｜[^｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[gMASK\]|<sop>|</?tool_[a-z]+>|</?think>"
    r"|\[/?[A-Z_]{3,}\]|\]~!b\[|\]~b\]|\[e~\[|</?minimax:tool_call>"
)


@dataclass(frozen=True)
class Family:
    """`stops`: the model's stop tokens, of an answer and of a tool call. `in_parts`: whether a turn costs its new text.
    `drops_thinking`: whether a new question makes the template leave thinking out. `marks_all`: whether it marks the
    thinking of every answer, also an empty one, so that it drops the marks of all. `moves_tools`: whether a new
    question moves the tools.
    """

    tokenizer: Kind
    stops: tuple[str, str]
    in_parts: bool
    drops_thinking: bool = False
    marks_all: bool = False
    moves_tools: bool = False
    has_tools: bool = True


_END = ("<|im_end|>", "<|im_end|>")
_DEEPSEEK_END = ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
FAMILIES = {
    "qwen2_5": Family("qwen", _END, in_parts=True),
    "qwen3": Family("qwen", _END, in_parts=True, drops_thinking=True),
    "qwen3_instruct_2507": Family("qwen", _END, in_parts=True),
    "qwen3_coder": Family("qwen", _END, in_parts=True),
    "qwen3_5_think": Family("qwen", _END, in_parts=True, drops_thinking=True, marks_all=True),
    "qwen3_6": Family("qwen", _END, in_parts=True),
    "qwen3_8": Family("qwen", _END, in_parts=True),
    "lfm2": Family("llama3", _END, in_parts=True),
    "llama3": Family("llama3", ("<|eot_id|>", "<|eot_id|>"), in_parts=True, has_tools=False),
    "llama3_1": Family("llama3", ("<|eot_id|>", "<|eot_id|>"), in_parts=True),
    "llama3_2": Family("llama3", ("<|eot_id|>", "<|eot_id|>"), in_parts=False),
    "nemotron_3_nano": Family("o200k", _END, in_parts=True, drops_thinking=True),
    "devstral": Family("o200k", ("</s>", "</s>"), in_parts=True),
    "mistral_v3": Family("metaspace", ("</s>", "</s>"), in_parts=False, moves_tools=True),
    "glm4moe": Family("llama3", ("<|user|>", "<|observation|>"), in_parts=False, drops_thinking=True),
    "deepseekv3": Family("deepseek", _DEEPSEEK_END, in_parts=False),
    "deepseek_r1_distill": Family("deepseek", _DEEPSEEK_END, in_parts=False),
    "gptoss": Family("o200k", ("<|return|>", "<|call|>"), in_parts=False),
    "kimi_k2": Family("kimi", _END, in_parts=False),
    "minimax_m2": Family("o200k", ("[e~[", "[e~["), in_parts=True, drops_thinking=True),
    "gemma4": Family("gemma", ("<turn|>", "<|tool_response>"), in_parts=False, drops_thinking=True),
    "gemma4_v5": Family("gemma", ("<turn|>", "<|tool_response>"), in_parts=False, drops_thinking=True),
    "cohere2": Family("llama3", ("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"), in_parts=False, has_tools=False),
    "phi3": Family("sentencepiece", ("<|end|>", "<|end|>"), in_parts=False, has_tools=False),
    "phi3_5": Family("sentencepiece", ("<|end|>", "<|end|>"), in_parts=False, has_tools=False),
}


def make_renderer(directory: Path, name: str, tokenizer: Kind | None = None) -> Renderer:
    """Make a model directory of the family, with another kind of tokenizer if one is given, and read it."""
    family = FAMILIES[name]
    own = OWN_TEMPLATES / f"{name}.jinja"
    shipped = resources.files("trl") / "chat_templates" / f"{name}.jinja"
    text = own.read_text() if own.is_file() else shipped.read_text()
    controls = [*CONTROL.findall(text), *family.stops, "<s>", "<|im_start|>", "<|endoftext|>"]
    make_family_tokenizer(directory, tokenizer or family.tokenizer, controls, list(family.stops))
    (directory / "chat_template.jinja").write_text(text)
    return Renderer(directory)


@dataclass
class Models:
    """Renderers by family, each made once."""

    directory: Path
    known: dict[str, Renderer] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Renderer:
        if name not in self.known:
            self.known[name] = make_renderer(self.directory / name, name)
        return self.known[name]


class Agent(Client):
    """A client whose answers alternate between tool calls and text, sampled letter by letter.

    `reasoning`: the thinking of its answers. `lane`: the sub-agent that its calls name.
    """

    def __init__(self, renderer: Renderer, name: str, seed: int = 0) -> None:
        super().__init__(renderer, seed)
        self.stops = FAMILIES[name].stops
        self.has_tools = FAMILIES[name].has_tools
        self.tools = self.tools if self.has_tools else []
        self.reasoning = ""
        self.lane = ""

    async def ask(self) -> PreparedCall:
        headers = {"x-claude-code-agent-id": self.lane} if self.lane else {}
        return await self.builder.prepare(self.session, self.body(), DIALECT, headers)

    def sample(self, prepared: PreparedCall, text: str | None = None, stop: str | None = None) -> WireMessage:
        """Answer with the given text, or with a call or a text of its own."""
        self.number += 1
        calls: tuple[ToolCall, ...] = ()
        if text is None and self.has_tools and self.number % 3:
            calls = (ToolCall(f"callnr{self.number:03}", "bash", {"a": "ls é"}),)
        shown = f"answer {self.number}" if text is None else text
        plain = self.renderer.tokenizer.plain
        end = plain.token_to_id(stop or self.stops[1 if calls else 0])
        sampled = np.array([*ids_of_letters(plain, shown), end], np.int32)
        message = Message("assistant", shown, self.reasoning, calls)
        thinks = prepared.thinks or self.renderer.thinks(message)
        growth = TurnGrowth(
            prepared.new_keys,
            message,
            prepared.lane,
            prepared.kind,
            self.renderer.ended(sampled),
            thinks,
            prepared.request.loose_keys[-1],
        )
        self.session.tree.add(self.number, prepared.attach_point, prepared.stream, sampled, growth)
        answer = WireMessage("assistant", (message,), sampled)
        self.history += [answer, *self.results(message)]
        return answer

    def results(self, message: Message) -> list[WireMessage]:
        if not message.tool_calls:
            return [WireMessage("user", (Message("user", f" follow{self.number} {self.text()}"),))]
        parts = [self.result(f"{self.text()} follow{self.number}", call.id) for call in message.tool_calls]
        return [WireMessage("user", tuple(parts))]

    def full(self) -> Ids:
        """Return the ids of the whole text, rendered and tokenised in one go."""
        return self.renderer.tokenizer.encode_whole(self.rendered())
