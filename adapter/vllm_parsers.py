"""Split sampled text into thinking, tool calls and plain text with vLLM's own parsers, chosen by name.

The format of a tool call depends on the model, and vLLM has a parser for each. Importing the parsers takes about 13 CPU
seconds, so it is done once, in a thread, while the server already answers; only calls that need a parser wait for it.
"""

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from adapter.argument_types import argument_types, read_value
from adapter.conversation import Tool
from adapter.dialects.base import InvalidRequestError
from adapter.live_answer import OutputMarks
from ratchet.errors import ConfigError

_THREAD_FROM_CHARS = 20_000
_MAX_TOOL_SETS = 256
_T = TypeVar("_T")


class ParsedCall(NamedTuple):
    """`arguments`: JSON text, not validated."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """`body` follows the thinking; `content`: the part of it outside of tool calls. `arguments`: those of each tool."""

    reasoning: str
    body: str
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()
    arguments: Mapping[str, Collection[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _VllmTools:
    """A preamble's tools, vLLM's form of them, a request of vLLM's with them, and the types of arguments by tool."""

    tools: Sequence[Tool]
    params: list[Any]
    request: Any
    types: dict[str, dict[str, frozenset[str]]]


@lru_cache(maxsize=1)
def _load_tokenizer(path: Path) -> Any:
    """Read once for all parsers of a model, which are tried one after another (`prompt/parser_choice.py`)."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    # Each parser asks for the whole vocabulary, and copying it takes tens of milliseconds.
    vocabulary = tokenizer.get_vocab()
    tokenizer.get_vocab = lambda: vocabulary
    return tokenizer


class VllmParsers:
    """`tool_parser` and `reasoning_parser` are vLLM's names (`qwen3_coder`, `hermes`, `qwen3`, …); None switches that
    parser off. `marks`: those at which the parsers act; None if they are not known, or not yet."""

    def __init__(
        self,
        model_path: Path,
        tool_parser: str | None,
        reasoning_parser: str | None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self._model_path = model_path
        self._template_kwargs = template_kwargs or {}
        self._lock = threading.Lock()
        self._tool_class: Any = None
        self._reasoning_class: Any = None
        self._known_tools: OrderedDict[int, _VllmTools] = OrderedDict()
        self._needs_none = tool_parser is None and reasoning_parser is None
        self._is_loaded = False
        self.marks = OutputMarks() if self._needs_none else None

    def load(self) -> None:
        """Import the parsers. Blocks; thread-safe. Raises ConfigError if vLLM has no parser of that name."""
        with self._lock:
            if not self._is_loaded:
                self._import()
                self.marks = self.marks or self._find_marks()
                self._is_loaded = True

    def _import(self) -> None:
        # The policy can write a call that cannot be read at any time; that is no error of this service.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        try:
            if self.tool_parser:
                self._tool_class = ToolParserManager.get_tool_parser(self.tool_parser)
            if self.reasoning_parser:
                self._reasoning_class = ReasoningParserManager.get_reasoning_parser(self.reasoning_parser)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"vLLM has no such output parser: {error}; its names are those of --tool-call-parser"
            ) from error
        self._tokenizer = _load_tokenizer(self._model_path / "tokenizer.json")
        self._request_class = ChatCompletionRequest
        self._tool_param_class = ChatCompletionToolsParam

    @property
    def ready(self) -> bool:
        """True if no call has to wait for the import any more."""
        return self._is_loaded or self._needs_none

    async def run(self, work: Callable[[], _T], num_chars: int) -> _T:
        """Return what `work` returns, which parses so many characters. The parsers are loaded before it begins."""
        if not self._is_loaded:
            await asyncio.to_thread(self.load)
        return work() if num_chars < _THREAD_FROM_CHARS else await asyncio.to_thread(work)

    def _find_marks(self) -> OutputMarks | None:
        """Ask the parsers for their marks, and try how they take an output that begins without one."""
        others = tuple(self._tokenizer.get_added_vocab())
        tool_marks: tuple[str, ...] | None = ()
        call_ends: tuple[str, ...] = ()
        if self._tool_class is not None:
            tool_parser = self._tool_class(self._tokenizer, [])
            tool_marks = _tool_marks(tool_parser)
            call_ends = _call_ends(tool_parser)
        if self._reasoning_class is None:
            return OutputMarks(tool_marks=tool_marks, call_ends=call_ends, others=others)
        parser = self._reasoning_class(self._tokenizer, chat_template_kwargs=self._template_kwargs)
        start, end = parser.reasoning_start_str, parser.reasoning_end_str
        if not start or not end:
            return None
        begins_thinking: bool | None = bool(self._extract_thinking("a")[0])
        changed_later = f"a{start}b" if begins_thinking else f"a{end}b"
        if self._extract_thinking(changed_later)[0].startswith("a") is not begins_thinking:
            begins_thinking = None
        strips_thinking = not self._extract_thinking(f"{start}a {end}b")[0].endswith(" ")
        return OutputMarks(start, end, begins_thinking, strips_thinking, tool_marks, call_ends, others)

    def split_thinking(self, text: str) -> ParsedText:
        """Separate thinking from what follows it. The parsers must be loaded."""
        if not self.reasoning_parser:
            return ParsedText("", text)
        thought, rest = self._extract_thinking(text)
        return ParsedText(thought.strip("\n"), rest.lstrip("\n"))

    def _extract_thinking(self, text: str) -> tuple[str, str]:
        """The thinking and the rest, by the marks at their borders: vLLM drops others, and what is before them."""
        parser = self._reasoning_class(self._tokenizer, chat_template_kwargs=self._template_kwargs)
        start, end = (parser.reasoning_start_str or "", parser.reasoning_end_str or "")
        thought = text.lstrip().removeprefix(start)
        begin = text[: len(text) - len(thought)]
        thought, border, rest = thought.partition(end) if end else (thought, "", "")
        unused = (one for one in map(chr, count(0xF0000)) if one not in text)
        hidden = {mark: next(unused) for mark in (start, end) if mark}
        shown = begin + _replaced(thought, hidden) + border + _replaced(rest, hidden)
        found = parser.extract_reasoning(shown, self._vllm_tools(()).request)
        marks = {one: mark for mark, one in hidden.items()}
        return _replaced(found[0] or "", marks), _replaced(found[1] or "", marks)

    def split_calls(self, body: str, tools: Sequence[Tool]) -> ParsedText:
        """Parse the tool calls of a text without thinking. The parsers must be loaded."""
        known = self._vllm_tools(tools)
        if self._tool_class is None or not known.params:
            return ParsedText("", body)
        tool_parser = self._tool_class(self._tokenizer, known.params)
        if self._reasoning_class is None and hasattr(tool_parser, "skip_reasoning_parsing"):
            tool_parser.skip_reasoning_parsing = True  # without a reasoning parser, marks of thinking are plain content
        config = _engine_config(tool_parser)
        if config is not None:  # no call is streamed: without this, each part of one reads the call from its start
            tool_parser._parser_engine._stream_arg_deltas = False
        found = tool_parser.extract_tool_calls(body, known.request)
        calls = found.tool_calls if found.tools_called else ()
        writes_text = config is not None and not config.tool_args_json
        parsed = tuple(
            _typed(call.function, known.types.get(call.function.name, {}))
            if writes_text
            else ParsedCall(call.function.name, call.function.arguments)
            for call in calls
        )
        return ParsedText("", body, found.content or "", parsed, known.types)

    def take_tools(self, tools: Sequence[Tool]) -> None:
        """Make vLLM's form of the tools, if the parsers are loaded. Raises InvalidRequestError if vLLM refuses them."""
        try:
            if self._is_loaded:
                self._vllm_tools(tools)
        except ValidationError as error:
            raise InvalidRequestError(f"tools: the output parser cannot take them: {_first_of(error)}") from error

    def _vllm_tools(self, tools: Sequence[Tool]) -> _VllmTools:
        """Return vLLM's form of the tools, in which no argument has a type: vLLM knows no references, and would change
        what was written (`argument_types.py`).

        Cached by identity: a preamble's tools are one object while the preamble is cached.
        """
        known = self._known_tools.get(id(tools))
        if known is None or known.tools is not tools:
            params = [self._tool_param_class.model_validate(tool) for tool in tools]
            types = {}
            for one in params:
                types[one.function.name] = argument_types(one.function.parameters)
                one.function.parameters = {"type": "object"}
            request = self._request_class(
                messages=[{"role": "user", "content": ""}], model="policy", tools=params or None
            )
            known = _VllmTools(tools, params, request, types)
            self._known_tools[id(tools)] = known
            while len(self._known_tools) > _MAX_TOOL_SETS:
                self._known_tools.popitem(last=False)
        return known


def _replaced(text: str, others: Mapping[str, str]) -> str:
    for one, other in others.items():
        text = text.replace(one, other)
    return text


def _first_of(error: ValidationError) -> str:
    """The field of the first thing that a model of vLLM refuses, and why."""
    found = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


def _typed(call: Any, types: Mapping[str, frozenset[str]]) -> ParsedCall:
    """A call of a format in which arguments are plain text, with the values that their types make of it."""
    try:
        values = json.loads(call.arguments)
    except ValueError:
        return ParsedCall(call.name, call.arguments)
    typed = {
        name: read_value(value, types.get(name, ())) if isinstance(value, str) else value
        for name, value in values.items()
    }
    return ParsedCall(call.name, json.dumps(typed, ensure_ascii=False))


def _engine_config(parser: Any) -> Any:
    """The configuration of a parser that is built on vLLM's parser engine, None for any other."""
    return getattr(getattr(parser, "_parser_engine", None), "parser_engine_config", None)


def _spellings(terminals: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...] | None:
    """Return the texts of terminals of vLLM's parser engine, None if one is a pattern."""
    found = [terminals[name] for name in names if name in terminals]
    texts = tuple(text for one in found for text in ((one,) if isinstance(one, str) else one))
    return None if any(set(text) & set("\\*+?()[]") for text in texts) else texts


def _tool_marks(parser: Any) -> tuple[str, ...] | None:
    """Return the texts at which a tool parser of vLLM may see a call begin, None if they cannot be told."""
    config = _engine_config(parser)
    if config is None:
        names = [getattr(parser, name, None) for name in ("tool_call_start_token", "tool_calls_start_token")]
        return tuple(one for one in names if isinstance(one, str) and one) or None
    outside = [terminal for state, terminal in config.transitions if state.name in ("CONTENT", "REASONING")]
    return _spellings(config.terminals, outside)


def _call_ends(parser: Any) -> tuple[str, ...]:
    """Return the texts at which a tool parser of vLLM sees a call, or a list of calls, end; none if it names none."""
    config = _engine_config(parser)
    if config is not None:
        return _spellings(config.terminals, ["TOOL_END"]) or ()
    ends = [getattr(parser, name, None) for name in ("tool_calls_end_token", "tool_call_end_token")]
    return tuple(one for one in ends if isinstance(one, str) and one)[:1]
