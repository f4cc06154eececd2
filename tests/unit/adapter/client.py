"""A simulated client that holds random conversations, and an oracle that computes what each prompt must be.

Prompts must be exact for everything that clients do: edits, cuts, resampling, equal messages in other shapes, other
lanes.

The oracle renders and tokenises the whole history in one go, then inserts the sampled ids of answers that came back as
sent. It gets these ids from the test (`WireMessage.ids`) and finds their places by splitting the text at turn marks, so
it shares nothing with the keys, the segments and the tree of the adapter.
"""

import base64
import io
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
from PIL import Image

from adapter.conversation import Message, ToolCall
from adapter.dialects.messages import MessagesDialect
from adapter.prompt.incremental_parser import IncrementalParser
from adapter.prompt.preamble_cache import PreambleCache
from adapter.prompt.prompt_builder import PreparedCall, PromptBuilder
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import HistoryRepairs
from adapter.prompt.session_cache import LiveSession, SessionCache
from adapter.turns.routing import EngineRouter
from adapter.turns.tree import TurnGrowth, TurnTree
from ratchet.types import SessionState
from store.arrays import Ids
from store.database import Database
from store.sessions import SessionRow

HOSTILE = [
    "<|im_end|>", "<|im_start|>", "<|im_start|>user\n", "<tool_call>", "</think>", "<think>\n", "<tool_response>",
    "é", "e\u0301", "\U0001f600", " ", "\n", "\t", "\r\n", "x=1", "\x01", "\x02", "\u200b", "  \n\n ", "\\n", '"',
    "def f(x):\n    return x\n", "日本", "\u0130",
]  # fmt: skip
TOOLS = [
    {"name": name, "description": "d", "input_schema": {"type": "object", "properties": {"a": {}}}}
    for name in ("bash", "read")
]
DIALECT = MessagesDialect()
IMAGE_SIZES = [(31, 7), (640, 480)]


def picture(kind: str = "PNG", size: tuple[int, int] = IMAGE_SIZES[1]) -> str:
    """The base64 text of an image."""
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


IMAGES = {
    f"\n[image, {width}x{height}, omitted]": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": picture(size=(width, height))},
    }
    for width, height in IMAGE_SIZES
}
"""Blocks of images, by what the model reads behind a text in their place."""


def blocks_of(message: Message) -> str | list[dict[str, Any]]:
    """Return a message's text as it is sent, with the image that it ends with as a block of its own."""
    if not message.num_omitted:
        return message.text
    shown = next(one for one in IMAGES if message.text.endswith(one))
    return [{"type": "text", "text": message.text.removesuffix(shown)}, IMAGES[shown]]


class SessionsWithoutStore(SessionCache):
    """All turns are made in this process, so there is nothing to load."""

    async def load(self, session: LiveSession) -> bool:
        session.loaded = True
        return False


def builder_of(renderer: Renderer) -> PromptBuilder:
    database = Database("postgresql://nobody@127.0.0.1:1/none")
    return PromptBuilder(renderer, EngineRouter(database), SessionsWithoutStore(database, renderer, 1))


def new_session(restores: bool = False) -> LiveSession:
    limits = {"max_context_tokens": 10**6, "max_response_tokens": 100}
    row = SessionRow(1, 1, 1, SessionState.OPEN, 1.0, "policy", limits)
    tree = TurnTree()
    repairs = HistoryRepairs(tree.with_reasoning if restores else None, orders_results=True)
    parser = IncrementalParser(PreambleCache(), repairs)
    return LiveSession(row, parser, tree, loaded=True)


@dataclass(frozen=True)
class WireMessage:
    """One message of a request. `ids`: the sampled ids of an answer that was not changed since."""

    role: str
    parts: tuple[Message, ...]
    ids: Ids | None = field(default=None, compare=False)


class Client:
    def __init__(self, renderer: Renderer, seed: int) -> None:
        self.renderer = renderer
        self.rng = random.Random(seed)
        self.builder = builder_of(renderer)
        self.session = new_session()
        self.system = self.rng.choice(["", "You are an agent.", self.text() or "s"])
        self.tools = TOOLS[: self.rng.randrange(3)]
        self.order = self.rng.choice(
            [("messages", "system", "tools"), ("system", "tools", "messages"), ("model", "messages", "tools", "system")]
        )
        self.history = [self.question()]
        self.number = 0
        self.sends_reasoning = True
        self.wire_order: dict[tuple[Message, ...], float] = {}
        self.thoughts = ["", "", "thought {}", "deep\n{}"]

    # ------------------------------------------------------------ messages

    def text(self) -> str:
        return "".join(self.rng.choices([*HOSTILE, "word ", "other "], k=self.rng.randrange(7)))

    def question(self) -> WireMessage:
        return WireMessage("user", (Message("user", self.text() + "?"),))

    def after(self, answer: WireMessage) -> list[WireMessage]:
        """The messages that follow an answer: tool results or a question, sometimes with more beside them."""
        calls = answer.parts[0].tool_calls
        parts = [self.result(self.text(), call.id) for call in calls]
        if calls and self.rng.random() < 0.3:
            parts.append(Message("user", "note " + self.text(), beside_tool=True))
        self.wire_order[tuple(parts)] = self.rng.random()
        messages = [WireMessage("user", tuple(parts))] if parts else [self.question()]
        if self.rng.random() < 0.15:
            messages.append(WireMessage("system", (Message("system", "reminder " + self.text()),)))
        return messages + ([self.question()] if self.rng.random() < 0.1 else [])

    def result(self, text: str, call_id: str) -> Message:
        """The result of a call, sometimes with an image that the agent opened."""
        if self.rng.random() < 0.8:
            return Message("tool", text, tool_call_id=call_id)
        return Message("tool", text + self.rng.choice(list(IMAGES)), tool_call_id=call_id, num_omitted=1)

    # ------------------------------------------------------------ one call

    async def ask(self) -> PreparedCall:
        lane = self.rng.choice(["", "", "", "agent-1"])
        return await self.builder.prepare(
            self.session, self.body(), DIALECT, {"x-claude-code-agent-id": lane} if lane else {}
        )

    def body(self) -> bytes:
        system = f"x-anthropic-billing-header: v{self.rng.random()}\n{self.system}"
        values: dict[str, Any] = {
            "model": "policy",
            "system": [{"type": "text", "text": system}] if self.system else "",
            "tools": self.tools,
        }
        values["messages"] = [
            self.wire(message, last=at >= len(self.history) - 2) for at, message in enumerate(self.history)
        ]
        dumped = orjson.dumps({name: values[name] for name in self.order} | {"max_tokens": 100})
        return dumped.replace(b'"role":', b' "role" : ') if self.rng.random() < 0.02 else dumped

    def wire(self, message: WireMessage, last: bool) -> dict[str, Any]:
        """One of the JSON forms that clients use for the same message.

        `cache_control` moves to the last messages with every call.
        """
        mark = {"cache_control": {"type": "ephemeral"}} if last else {}
        blocks: list[dict[str, Any]] = []
        for part in self.sent_parts(message):
            if part.role == "tool":
                blocks.append({"type": "tool_result", "tool_use_id": part.tool_call_id, "content": blocks_of(part)})
                continue
            if part.reasoning and self.sends_reasoning:
                blocks.append({"type": "thinking", "thinking": part.reasoning, "signature": str(self.rng.random())})
            if part.text or not part.tool_calls:
                blocks.append({"type": "text", "text": part.text})
            blocks += [
                {"type": "tool_use", "id": one.id, "name": one.name, "input": dict(one.arguments)}
                for one in part.tool_calls
            ]
        if len(blocks) == 1 and blocks[0]["type"] == "text" and not last and blocks[0]["text"]:
            return {"role": message.role, "content": blocks[0]["text"]}
        return {"role": message.role, "content": [*blocks[:-1], blocks[-1] | mark]}

    def sent_parts(self, message: WireMessage) -> tuple[Message, ...]:
        """The parts as they are sent: results of parallel calls come in any order, the same one each time."""
        if all(part.role == "tool" for part in message.parts) and self.wire_order.get(message.parts, 1) < 0.4:
            return message.parts[::-1]
        return message.parts

    def sample(self, prepared: PreparedCall) -> WireMessage:
        """Add a turn to the tree: an answer in ids that no tokenizer would choose, ended in one of the ways that models
        end.
        """
        self.number += 1
        tokenizer = self.renderer.tokenizer
        rng = self.rng
        text = f"answer {self.number} {self.text()}"
        cut = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[start:end] for start, end in zip([0, *cut], [*cut, len(text)], strict=True)]
        ids = np.array(
            [one for piece in pieces for one in tokenizer.plain.encode(piece, add_special_tokens=False).ids], np.int32
        )
        end = rng.choice(
            [[tokenizer.plain.token_to_id("<|im_end|>")]] * 4 + [[tokenizer.plain.token_to_id("<|endoftext|>")], []]
        )
        calls = tuple(
            ToolCall(f"c{self.number}-{at}", rng.choice(["bash", "read"]), {"b": 1.0, "a": self.text()})
            for at in range(rng.choice([0, 1, 1, 2]))
        )
        message = Message("assistant", tokenizer.decode(ids), rng.choice(self.thoughts).format(self.number), calls)
        sampled = np.concatenate([ids, np.array(end, np.int32)])
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
        return WireMessage("assistant", (message,), sampled)

    # ------------------------------------------------------------ what clients do

    def go_on(self, answer: WireMessage) -> None:
        """Usually the conversation grows; sometimes it is cut, edited or compacted, or the request is sent again."""
        act = self.rng.random()
        if act < 0.06:
            return
        self.history += [answer, *self.after(answer)]
        if act < 0.12:
            del self.history[self.rng.randrange(1, len(self.history)) :]
            if self.history[-1].role == "assistant":
                self.history += self.after(self.history[-1])
            self.history = self.history if self.history[-1].role != "system" else [*self.history, self.question()]
        elif act < 0.2:
            self.edit(self.rng.randrange(len(self.history)))
        elif act < 0.23:
            self.history = [WireMessage("user", (Message("user", "summary: " + self.text()),))]

    def edit(self, at: int) -> None:
        message = self.history[at]
        part = message.parts[-1]
        changed = replace(part, text=part.text + "edited", num_omitted=0)
        self.history[at] = WireMessage(message.role, (*message.parts[:-1], changed))

    # ------------------------------------------------------------ the oracle

    def rendered(self) -> str:
        """Return the text of the whole history, with aliases."""
        messages = [Message("system", self.system)] if self.system else []
        for message in self.history:
            messages += message.parts
        tools = [
            {
                "type": "function",
                "function": {"name": one["name"], "description": "d", "parameters": one["input_schema"]},
            }
            for one in self.tools
        ]
        return self.renderer.template.render(messages, tools, generation_prompt=True)

    def expected(self) -> Ids:
        answers = [message for message in self.history if message.role == "assistant"]
        text = self.rendered()
        start = self.renderer.tokenizer.alias["<|im_start|>"] + "assistant\n"
        end = self.renderer.tokenizer.alias["<|im_end|>"]
        first, *blocks = text.split(start)
        assert len(blocks) == len(answers) + 1 and blocks[-1] == ""
        parts: list[Ids] = []

        def encode(text: str) -> Ids:
            """Tokenise the text at the start of the prompt, or behind a control token."""
            whole = self.renderer.tokenizer.encode_whole
            return whole(end + text)[1:] if parts else whole(text)

        pending = first
        for answer, block in zip(answers, blocks, strict=False):
            shown, _, rest = block.partition(end)
            kept = not answer.parts[0].reasoning or answer.parts[0].reasoning in shown
            if answer.ids is not None and kept:
                parts += [encode(pending + start), answer.ids]
                pending = ("" if self.renderer.ended(answer.ids) else end) + rest
            else:
                pending += start + block
        return np.concatenate([*parts, encode(pending + start)])
