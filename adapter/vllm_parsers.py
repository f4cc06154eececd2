"""Sampled text → thinking, tool calls and plain text, by vLLM's own parsers, chosen by name.

Why here: what a tool call looks like is the model's affair, and vLLM already knows all of them.
Called by: `outputs.py`. Importing the parsers takes about 13 CPU seconds, so it happens once, in a thread, while the server
already answers; only calls that need a parser wait for it.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adapter.conversation import Tool
from ratchet.errors import ConfigError

_THREAD_FROM_CHARS = 20_000
_TOOLS_KEPT = 256


class _Parsers(Protocol):
    def split(self, text: str, tools: Sequence[Tool]) -> "ParsedText": ...


@dataclass(frozen=True, slots=True)
class ParsedText:
    """`body` is what follows the thinking, `content` the part of it outside of the tool calls, `calls` (name, arguments as JSON)."""

    reasoning: str
    body: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class VllmParsers:
    """`tool_parser` and `reasoning_parser` are vLLM's names (`qwen3_coder`, `hermes`, `qwen3`, …); None switches that part off."""

    def __init__(
        self,
        model_path: Path,
        tool_parser: str | None,
        reasoning_parser: str | None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self._model_path, self._template_kwargs = model_path, template_kwargs or {}
        self._lock = threading.Lock()
        self._parsers: _Parsers | None = None

    def load(self) -> None:
        """Imports the parsers. Blocks; safe to call from several threads. Raises ConfigError where vLLM does not know a name."""
        with self._lock:
            if self._parsers is None:
                self._parsers = _VllmParsers(
                    self._model_path, self.tool_parser, self.reasoning_parser, self._template_kwargs
                )

    @property
    def ready(self) -> bool:
        """Whether no call has to wait for an import any more."""
        return self._parsers is not None or (self.tool_parser is None and self.reasoning_parser is None)

    async def split(self, text: str, tools: Sequence[Tool]) -> ParsedText:
        """Without `tools` no tool call is looked for."""
        if (self.tool_parser is None or not tools) and self.reasoning_parser is None:
            return ParsedText("", text)
        if self._parsers is None:
            await asyncio.to_thread(self.load)
        assert self._parsers is not None
        if len(text) < _THREAD_FROM_CHARS:
            return self._parsers.split(text, tools)
        return await asyncio.to_thread(self._parsers.split, text, tools)


class _VllmParsers:
    def __init__(
        self, model_path: Path, tool_parser: str | None, reasoning_parser: str | None, template_kwargs: dict[str, Any]
    ) -> None:
        from transformers import PreTrainedTokenizerFast
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        try:
            self._tool_class = ToolParserManager.get_tool_parser(tool_parser) if tool_parser else None
            self._reasoning_class = (
                ReasoningParserManager.get_reasoning_parser(reasoning_parser) if reasoning_parser else None
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"vLLM has no such output parser: {error}; its names are those of --tool-call-parser"
            ) from error
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_path / "tokenizer.json"))
        # Every parser asks for the whole vocabulary, and a fresh copy of it takes tens of milliseconds.
        vocabulary = self._tokenizer.get_vocab()
        self._tokenizer.get_vocab = lambda: vocabulary
        self._known: OrderedDict[int, tuple[Sequence[Tool], list[Any], Any]] = OrderedDict()
        self._template_kwargs = template_kwargs
        self._request_class, self._tool_param = ChatCompletionRequest, ChatCompletionToolsParam

    def split(self, text: str, tools: Sequence[Tool]) -> ParsedText:
        """Without `tools` no tool call is looked for."""
        params, request = self._request(tools)
        reasoning, body = "", text
        if self._reasoning_class is not None:
            parser = self._reasoning_class(self._tokenizer, chat_template_kwargs=self._template_kwargs)
            thought, rest = parser.extract_reasoning(text, request)
            reasoning, body = (thought or "").strip("\n"), (rest or "").lstrip("\n")
        if self._tool_class is None or not params:
            return ParsedText(reasoning, body)
        tool_parser = self._tool_class(self._tokenizer, params)
        if self._reasoning_class is None and hasattr(tool_parser, "skip_reasoning_parsing"):
            tool_parser.skip_reasoning_parsing = True  # without a reasoning parser its marks are plain content
        found = tool_parser.extract_tool_calls(body, request)
        calls = (
            tuple((call.function.name, call.function.arguments) for call in found.tool_calls)
            if found.tools_called
            else ()
        )
        return ParsedText(reasoning, body, found.content or "", calls)

    def _request(self, tools: Sequence[Tool]) -> tuple[list[Any], Any]:
        """vLLM's form of the tools and of a request with them. A head's tools are one object for as long as the head is known."""
        found = self._known.get(id(tools))
        if found is None or found[0] is not tools:
            params = [self._tool_param.model_validate(tool) for tool in tools]
            request = self._request_class(
                messages=[{"role": "user", "content": ""}], model="policy", tools=params or None
            )
            found = self._known[id(tools)] = (tools, params, request)
            while len(self._known) > _TOOLS_KEPT:
                self._known.popitem(last=False)
        return found[1], found[2]
