"""Find the output parsers of vLLM that fit a model, by trying them on answers that the model's own template writes.

A template shows an answer with thinking and tool calls in the form in which the model was trained to write it. A parser
fits if it reads the same thinking, text and calls from that form.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adapter.conversation import Message, ToolCall, tool_of
from adapter.prompt.chat_template import TemplateRefusedError
from adapter.prompt.renderer import Renderer
from adapter.vllm_parsers import VllmParsers
from ratchet.errors import ConfigError

_TOOLS = (
    tool_of(
        "edit_file",
        "Replace text in a file.",
        {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "line": {"type": "integer"},
            "dry": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        required="path",
    ),
    tool_of("run", "Run a command.", {"command": {"type": "string"}}, required="command"),
)
_QUESTION = Message("user", "Please mend the test.")
_EDIT = ToolCall("call00001", "edit_file", {"path": "a b.py", "text": "if x < 1:\n    y = '\"'\n", "line": 3})
_TYPES = ToolCall("call00002", "edit_file", {"path": "c.py", "dry": True, "tags": ["x", "y"]})
_RUN = ToolCall("call00003", "run", {"command": "grep -c '{' c.py && echo \"done\""})
_ANSWERS = (
    Message("assistant", "", tool_calls=(_RUN,)),
    Message("assistant", "I look first.", tool_calls=(_EDIT,)),
    Message("assistant", "", tool_calls=(_TYPES,)),
)
_TWO_CALLS = Message("assistant", "", tool_calls=(_EDIT, _RUN))
_THOUGHTS = (
    Message("assistant", "It is mended.", "First I look.\nThen I mend it."),
    Message("assistant", "Done: 1 < 2.", "Short."),
)
_NO_THOUGHT = Message("assistant", "It is mended.")


class FittingParser(NamedTuple):
    """A parser of vLLM. `complete`: it also reads an answer with two calls, or without thinking."""

    name: str
    complete: bool


class ParserChoice(NamedTuple):
    """The parsers that fit, in vLLM's order. `tools` or `thinking` is None if the template shows none."""

    tools: Sequence[FittingParser] | None
    thinking: Sequence[FittingParser] | None


def fitting_parsers(renderer: Renderer) -> ParserChoice:
    """Try all of vLLM's parsers on the template's text, for half a minute. Raises ConfigError without vLLM."""
    try:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(f"output parsers are vLLM's, and vLLM is not installed here: {error}") from None
    thoughts = _all_written(renderer, _THOUGHTS)
    thinking = None
    if thoughts:
        found = [name for name in ReasoningParserManager.list_registered() if _reads_thinking(renderer, name, thoughts)]
        plain = _all_written(renderer, [_NO_THOUGHT])
        thinking = [FittingParser(name, _reads_thinking(renderer, name, plain)) for name in found]
    before_calls = next((parser.name for parser in thinking or () if parser.complete), None)
    written = _without_thinking(renderer, before_calls, _all_written(renderer, _ANSWERS))
    tools = None
    if written:
        found = [name for name in ToolParserManager.list_registered() if _reads_calls(renderer, name, written)]
        two = _without_thinking(renderer, before_calls, _all_written(renderer, [_TWO_CALLS]))
        tools = [FittingParser(name, bool(two) and _reads_calls(renderer, name, two)) for name in found]
    return ParserChoice(tools, thinking)


class _Written(NamedTuple):
    """An answer, and the text that the model samples for it."""

    answer: Message
    text: str


def _all_written(renderer: Renderer, answers: Sequence[Message]) -> list[_Written]:
    """Return the answers that the template shows."""
    return [_Written(answer, text) for answer in answers if (text := _written(renderer, answer)) is not None]


def _without_thinking(renderer: Renderer, parser: str | None, written: Sequence[_Written]) -> list[_Written]:
    """Cut off what a parser of thinking takes: templates write an empty thought before an answer without one."""
    if parser is None:
        return list(written)
    parsers = VllmParsers(renderer.model_path, None, parser)
    parsers.load()
    return [one._replace(text=parsers.split_thinking(one.text).body) for one in written]


def _written(renderer: Renderer, answer: Message) -> str | None:
    """Return the text that the model samples for this answer, without its end token; None if it is not shown."""
    template, tokenizer = renderer.template, renderer.tokenizer
    try:
        prompt = tokenizer.encode_whole(template.render([_QUESTION], _TOOLS, generation_prompt=True))
        ids = tokenizer.encode_whole(template.render([_QUESTION, answer], _TOOLS))
    except TemplateRefusedError:
        return None
    size = min(len(prompt), len(ids))
    differs = np.flatnonzero(prompt[:size] != ids[:size])
    ids = ids[int(differs[0]) if len(differs) else size :]
    while len(ids) and (int(ids[-1]) in renderer.stop_ids or not tokenizer.decode(ids[-1:]).strip()):
        ids = ids[:-1]
    text = tokenizer.decode(ids)
    shown = [answer.text, answer.reasoning, *(call.name for call in answer.tool_calls)]
    return text if all(part in text for part in shown) else None


def _reads_calls(renderer: Renderer, name: str, written: Sequence[_Written]) -> bool:
    """Return whether the parser reads the calls, and the text outside of them, of every answer."""
    try:
        parsers = VllmParsers(renderer.model_path, name, None)
        parsers.load()
        for answer, text in written:
            found = parsers.split_calls(text, _TOOLS)
            calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
            if calls != [(call.name, dict(call.arguments)) for call in answer.tool_calls]:
                return False
            if found.content.strip() != answer.text:
                return False
    except Exception:  # a parser of another model raises any error on this text or vocabulary
        return False
    return True


def _reads_thinking(renderer: Renderer, name: str, written: Sequence[_Written]) -> bool:
    """Return whether the parser separates thinking and text of every answer."""
    try:
        parsers = VllmParsers(renderer.model_path, None, name)
        parsers.load()
        found = [parsers.split_thinking(text) for _, text in written]
    except Exception:  # as above
        return False
    return all(
        (one.reasoning.strip(), one.body.strip()) == (answer.reasoning, answer.text)
        for one, (answer, _) in zip(found, written, strict=True)
    )
