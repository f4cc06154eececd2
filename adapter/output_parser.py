"""Sampled ids → the assistant's message as the client gets it. Everything that clients ask for acts here, on text, never on logits.

Why here: a stop sequence or a forced tool that reached the sampler would change what the recorded logprobs mean.
Called by: `capture.py`, once per generation.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import orjson
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from adapter.conversation import Finish, Message, RequestOptions, Tool, ToolCall
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import ParsedRequest
from adapter.vllm_parsers import VllmParsers
from ratchet.store.arrays import Ids

_THREAD_FROM_TOKENS = 500  # fewer are decoded a dozen times in a few milliseconds


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """`reasoning_chars`: how far into the sampled text the thinking and its end mark reach."""

    message: Message
    finish: Finish
    stop_sequence: str | None = None
    reasoning_chars: int = 0


class OutputParser:
    def __init__(self, renderer: Renderer, parser: VllmParsers) -> None:
        self._renderer, self._parser = renderer, parser

    def text(self, ids: Ids) -> str:
        return self._renderer.tokens.decode(ids)

    async def reasoning_tokens(self, ids: Ids, output: ParsedOutput) -> int:
        """How many of the sampled ids are thinking, its marks included: the shortest prefix of them that spells it."""
        if not output.reasoning_chars:
            return 0
        if len(ids) < _THREAD_FROM_TOKENS:
            return self._num_spelling(ids, output.reasoning_chars)
        return await asyncio.to_thread(self._num_spelling, ids, output.reasoning_chars)

    def _num_spelling(self, ids: Ids, num_chars: int) -> int:
        return bisect_left(range(len(ids)), num_chars, key=lambda num: len(self.text(ids[:num])))

    async def read(self, text: str, reading: ParsedRequest, stopped: bool) -> ParsedOutput:
        """`stopped`: the model ended its answer itself.

        A tool call that is cut off, names no offered tool, lacks a required argument or breaks a strict schema is not guessed at: the
        whole output goes back as plain text, and the agent tells the model what it could not read.
        """
        wishes, tools = reading.wishes, reading.head.tools
        text, stop_sequence = _cut(text, wishes.stop_sequences)
        complete = (stopped or stop_sequence is not None) and wishes.tool_choice != "none"
        parsed = await self._parser.split(text, tools if complete else ())
        calls = tuple(
            call for name, arguments in parsed.calls if (call := _call(name, arguments, tools, wishes)) is not None
        )
        if not calls or len(calls) < len(parsed.calls):
            message = Message("assistant", parsed.body, parsed.reasoning)
        else:
            message = Message("assistant", parsed.content, parsed.reasoning, calls)
        if not wishes.parallel_calls:
            message = replace(message, tool_calls=message.tool_calls[:1])
        if message.tool_calls:
            finish: Finish = "tool_calls"
        else:
            finish = "stop_sequence" if stop_sequence is not None else "stop" if stopped else "length"
        told = stop_sequence if finish == "stop_sequence" else None
        return ParsedOutput(
            message, finish, told, len(text.removesuffix(parsed.body).rstrip("\n")) if parsed.reasoning else 0
        )


def _cut(text: str, stop_sequences: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop sequence in it, and which one that was."""
    found = min(((at, one) for one in stop_sequences if (at := text.find(one)) >= 0), default=None)
    return (text, None) if found is None else (text[: found[0]], found[1])


def _call(name: str, arguments: str, tools: Sequence[Tool], wishes: RequestOptions) -> ToolCall | None:
    schema = next(
        (tool["function"].get("parameters") or {} for tool in tools if tool["function"].get("name") == name), None
    )
    if schema is None:
        return None
    try:
        values = orjson.loads(arguments or "{}")
        orjson.dumps(values)  # nested deeper than any client could send back
    except (orjson.JSONDecodeError, TypeError):
        return None
    required = schema.get("required")
    if not isinstance(values, dict) or any(
        key not in values for key in (required if isinstance(required, list) else [])
    ):
        return None
    if name in wishes.strict_tools and not _fits(values, schema):
        return None
    return ToolCall(f"call_{uuid4().hex[:24]}", name, values)


def _fits(values: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Schemas come from the box: one that refers to something outside of itself is not followed there, and nothing fits it."""
    try:
        return bool(validator_for(schema)(schema, registry=Registry()).is_valid(values))
    except Unresolvable:
        return False
