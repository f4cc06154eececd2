"""Compare a parsed call with its sampled text: the model's own template must write from the call what was sampled.

A parser may cut a value at a mark inside of it, or take a part of a value for another argument. The agent would then
do, and the policy be judged by, what the model did not write. These differences change nothing and are taken:

- white space between marks, and the line breaks around a value that the template writes;
- a mark that is the same in all calls and is missing at the end of a line or of the call;
- text behind a call that has no mark of calls;
- the spelling of JSON: white space, escapes, the order of members, the form of equal numbers;
- the spelling of a value that is no string, as `argument_types.py` reads it.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from adapter.argument_types import different_members, read_value, type_name
from adapter.conversation import Message, ToolCall
from adapter.prompt.chat_template import TemplateRefusedError
from adapter.prompt.renderer import Renderer

_QUESTION = Message("user", "q")
_ANSWER = Message("assistant", "zxqa")
_NAME = "zxqn"
_ARGUMENT = "zxqk"
_VALUE = "zxqv"
_ID = "zxqjcid01"


class WrittenCalls:
    """The calls that one template writes. `sample`: one of them, None if its calls cannot be compared: it shows none
    behind a text, or shows their ids, which clients do not get as they were sampled."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._between_values = lru_cache(maxsize=64)(self._find_between_values)
        self.sample_call = _stub(1)
        sample = self.text_of([self.sample_call])
        shown = (_NAME, f"{_ARGUMENT}0", f"{_VALUE}0")
        is_compared = all(part in sample for part in shown) and _ID not in sample and f"{_NAME}:0" not in sample
        self.sample = sample if is_compared else None
        self._is_json = f'"{_VALUE}0"' in sample

    def are(self, text: str, calls: Sequence[ToolCall], known: Mapping[str, Collection[str]]) -> bool:
        """Return whether a text has these calls. `known`: the arguments of each tool."""
        return _is_same_json(text, self.text_of(calls)) if self._is_json else self._are_values(text, calls, known)

    def text_of(self, calls: Sequence[ToolCall]) -> str:
        """The text of calls behind an answer's text; empty if the template shows none there."""
        try:
            whole = self._renderer.template.render([_QUESTION, replace(_ANSWER, tool_calls=tuple(calls))])
            without = self._renderer.template.render([_QUESTION, _ANSWER])
        except TemplateRefusedError:
            return ""
        text = whole.partition(_ANSWER.text)[2].removesuffix(without.partition(_ANSWER.text)[2])
        return self._renderer.tokenizer.with_names(text)

    def _find_between_values(self, num_arguments: int) -> list[str]:
        """The template's text before, between and behind the values of a call."""
        return re.split(f"{_VALUE}[0-9]+", self.text_of([_stub(num_arguments)]))

    def _are_values(self, text: str, calls: Sequence[ToolCall], known: Mapping[str, Collection[str]]) -> bool:
        at = 0
        marks: list[_Mark] = []
        for call in calls:
            names = [*call.arguments, ""]
            literals = self._between_values(len(call.arguments))
            if len(literals) != len(names):
                return False
            for number, (literal, name) in enumerate(zip(literals, names, strict=True)):
                marks = [_mark(part, call.name, names) for part in literal.split()]
                if number:
                    at = _end_of_value(text, at, call.arguments[names[number - 1]], marks)
                is_inner = 0 < number < len(call.arguments)
                needs_all = is_inner and name not in known.get(call.name, ())
                found = _pattern(literal, marks, is_inner, needs_all).match(text, at) if at >= 0 else None
                if found is None:
                    return False
                at = found.end()
        return not text[at:].strip() or _is_text_behind(text[:at], text[at:], [mark.text for mark in marks])


class _Mark(NamedTuple):
    """A part of a template's text without white space. `is_fixed`: it has no name of a tool or an argument."""

    text: str
    is_fixed: bool


def _mark(part: str, tool: str, arguments: Sequence[str]) -> _Mark:
    text = re.sub(f"{_ARGUMENT}([0-9]+)", lambda found: arguments[int(found[1])], part.replace(_NAME, "\0"))
    return _Mark(text.replace("\0", tool), _ARGUMENT not in part and _NAME not in part)


def _pattern(literal: str, marks: Sequence[_Mark], is_inner: bool, needs_all: bool) -> re.Pattern[str]:
    """A pattern of a template's text. `is_inner`: it is between two values."""
    missing = r"|(?=\s*?\n)" if is_inner else "|"
    parts = [rf"(?:\s*{re.escape(text)}{missing if is_fixed and not needs_all else ''})" for text, is_fixed in marks]
    return re.compile("".join(parts) + (r"\n?" if literal.endswith("\n") else ""))


def _end_of_value(text: str, at: int, value: Any, marks: Sequence[_Mark]) -> int:
    """The end of a value that begins at a place of a text; -1 if it is not there."""
    if isinstance(value, str):
        return at + len(value) if text.startswith(value, at) else -1
    end = min((found for mark in marks if (found := text.find(mark.text, at)) >= 0), default=len(text))
    read = read_value(text[at:end], {type_name(value)})
    return end if (read, type(read)) == (value, type(value)) else -1


def _is_text_behind(calls: str, rest: str, marks: Sequence[str]) -> bool:
    """Return whether what follows calls is text. `marks`: those with which the last call ends, if it is whole."""
    return bool(marks) and calls.rstrip().endswith(marks[-1]) and not any(mark in rest for mark in marks)


def _stub(num_arguments: int) -> ToolCall:
    return ToolCall(_ID, _NAME, {f"{_ARGUMENT}{at}": f"{_VALUE}{at}" for at in range(num_arguments)})


def _is_same_json(text: str, written: str) -> bool:
    try:
        parts, expected = _json_parts(text), _json_parts(written)
    except (ValueError, RecursionError):
        return False
    end, expected_end = parts.pop(), expected.pop()
    begins = end.startswith(expected_end) or expected_end.startswith(end)
    rest = end.removeprefix(expected_end) if end.startswith(expected_end) else ""
    return parts == expected and begins and not (rest and (not expected_end or expected_end in rest))


def _json_parts(text: str) -> list[Any]:
    """The JSON objects of a text, and without white space what is before, between and behind them.

    Raises ValueError if a brace begins no object.
    """
    parts: list[Any] = []
    at = 0
    while (start := text.find("{", at)) >= 0:
        value, end = _JSON.raw_decode(text, start)
        parts += ["".join(text[at:start].split()), value]
        at = end
    return [*parts, "".join(text[at:].split())]


def _number(text: str) -> tuple[str, Decimal]:
    return "number", Decimal(text)


_JSON = json.JSONDecoder(parse_int=_number, parse_float=_number, object_pairs_hook=different_members)
