"""The requests of an agent: a model directory with a vocabulary of realistic size, and long conversations of code and
tool results.

The texts are taken from the standard library's source. Training the tokenizer takes half a minute; it is cached.
"""

import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from ratchet import paths
from tests.standins.tiny_model import make_tokenizer

VOCABULARY = 32_000


def model_directory() -> Path:
    directory = paths.cache() / "tests" / f"bpe-{VOCABULARY}"
    if not (directory / "generation_config.json").is_file():
        make_tokenizer(directory, VOCABULARY, [corpus()[at : at + 20_000] for at in range(0, 6_000_000, 20_000)])
    return directory


@cache
def corpus() -> str:
    """Python source, one file after the other."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return "".join(
        file.read_text(errors="ignore") for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-j]*/*.py"))
    )


def source(rng: random.Random) -> Callable[[int], str]:
    """A function that returns a random piece of code of the given length."""

    def piece(length: int) -> str:
        start = rng.randrange(len(corpus()) - length)
        return corpus()[start : start + length]

    return piece


@dataclass(frozen=True)
class Answer:
    """An assistant's turn: text and one tool call."""

    text: str
    call_id: str
    command: str

    def wire(self) -> dict[str, Any]:
        call = {"type": "tool_use", "id": self.call_id, "name": "Bash", "input": {"command": self.command}}
        return {"role": "assistant", "content": [{"type": "text", "text": self.text}, call]}

    def sampled_text(self) -> str:
        parameter = f"<parameter=command>\n{self.command}\n</parameter>"
        return f"{self.text}\n<tool_call>\n<function=Bash>\n{parameter}\n</function>\n</tool_call>"


class Conversation:
    """One agent's history in Anthropic Messages, in the form that Claude Code sends: `cache_control` moves with every
    call.
    """

    def __init__(self, seed: int, system_chars: int, result_chars: int, shared_seed: int = 0) -> None:
        """Conversations with the same `shared_seed` have the same system text and tools, as rollouts of one task do."""
        self.rng = random.Random(f"conversation {seed}")
        self.result_chars = result_chars
        self.piece = source(self.rng)
        self.preamble = _preamble(shared_seed, system_chars)
        self.messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": f"Task {seed}\n" + self.piece(1500)}]}
        ]

    def body(self, **more: Any) -> bytes:
        last = self.messages[-1]
        marked = last | {
            "content": [*last["content"][:-1], last["content"][-1] | {"cache_control": {"type": "ephemeral"}}]
        }
        messages = orjson.dumps([*self.messages[:-1], marked])
        return (
            b'{"model":"policy","messages":'
            + messages
            + b","
            + self.preamble
            + b","
            + orjson.dumps({"max_tokens": 4000} | more)[1:]
        )

    def answer(self) -> Answer:
        return Answer(
            self.piece(160).strip() or "Looking.",
            f"call_{self.rng.getrandbits(64):016x}",
            "grep -n " + self.piece(40).strip(),
        )

    def go_on(self, answer: dict[str, Any], call_id: str) -> None:
        length = int(self.result_chars * self.rng.uniform(0.2, 1.8))
        result = {
            "type": "tool_result",
            "tool_use_id": call_id,
            "content": [{"type": "text", "text": self.piece(length)}],
        }
        self.messages += [answer, {"role": "user", "content": [result]}]


@cache
def _preamble(seed: int, system_chars: int) -> bytes:
    """System blocks and tool schemas, half of the text each."""
    piece = source(random.Random(f"head {seed}"))
    names = ["Bash", "Read", "Edit", "Write", "Glob", "Grep", "Task", "TodoWrite", *(f"Tool{no}" for no in range(12))]
    schema = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": piece(120)}},
        "required": ["command"],
    }
    tools = [
        {"name": name, "description": piece(system_chars // 2 // len(names)), "input_schema": schema} for name in names
    ]
    system = [{"type": "text", "text": piece(system_chars // 4)} for _ in range(2)]
    return orjson.dumps({"system": system, "tools": tools})[1:-1]


def trajectory(seed: int, num_turns: int, system_chars: int, result_chars: int) -> Iterator[tuple[bytes, Answer]]:
    """The requests' bodies and the answers to them, turn by turn."""
    conversation = Conversation(seed, system_chars, result_chars)
    for _ in range(num_turns):
        answer = conversation.answer()
        yield conversation.body(), answer
        conversation.go_on(answer.wire(), answer.call_id)
