"""Parse sampled ids into the assistant's message that the client gets.

Tool choice and strict schemas act here, on the text. If they reached the sampler, they would change what the recorded
logprobs mean. Stop sequences end the generation in the engine, which changes no logprob. The output ends with the token
that completes one, and the text before the stop sequence. That token is kept whole, even if its text goes on behind the
stop sequence: it was sampled as one action, and no part of it can be a target or a context of its own.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import orjson
import structlog

from adapter.call_reader import CallReader, FoundCall
from adapter.conversation import Finish, Message, RequestOptions, TokenLogprob, Tool, ToolCall, can_be_stored
from adapter.endpoint import EndpointAnswer
from adapter.live_answer import LiveAnswer
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import ParsedRequest
from adapter.structured_output import matches_schema, violation_of
from adapter.vllm_parsers import ParsedCall, ParsedText, VllmParsers
from store.arrays import Ids

_LOG = structlog.get_logger("ratchet.adapter")
_THREAD_FROM_TOKENS = 500  # decoding fewer a dozen times takes a few milliseconds


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A sampled text as an assistant's message.

    `stop_sequence`: the one that ended the text. `reasoning_chars`: length of the thinking and its end mark in the
    text. `violation`: how the text violates the format that was asked for.
    """

    message: Message
    finish: Finish
    stop_sequence: str | None = None
    reasoning_chars: int = 0
    violation: str | None = None


class _CutText(NamedTuple):
    """A text and the stop sequence at which it was cut, None if it is whole."""

    text: str
    stop_sequence: str | None


class _ReadText(NamedTuple):
    """A text as a message. `body`: what follows its thinking."""

    message: Message
    body: str


class OutputParser:
    def __init__(self, renderer: Renderer, parsers: VllmParsers) -> None:
        self._renderer = renderer
        self._parsers = parsers
        self._shows_live = True

    def live_answer(self, request: ParsedRequest) -> LiveAnswer | None:
        """Return what a stream shows while the answer is sampled; None if nothing can be shown."""
        marks = self._parsers.marks
        if marks is None or not self._shows_live:
            return None
        options = request.options
        has_tools = self._reads_calls(request)
        tokenizer = self._renderer.tokenizer.plain
        reader = self._reader(request) if has_tools and self._parsers.ready else None
        return LiveAnswer(tokenizer, self._renderer.stop_ids, marks, options.stop_sequences, has_tools, reader)

    def take(self, request: ParsedRequest) -> None:
        """Make what the parsers need of a request, before its row is opened: afterwards no error is the client's.

        While the parsers are not loaded yet, nothing is made. Raises InvalidRequestError.
        """
        if self._reads_calls(request):
            self._parsers.take_tools(request.preamble.tools)

    def _reads_calls(self, request: ParsedRequest) -> bool:
        has_tools = self._parsers.tool_parser is not None and bool(request.preamble.tools)
        return has_tools and request.options.tool_choice.allows_calls

    def _reader(self, request: ParsedRequest) -> CallReader:
        options = request.options
        tools = request.preamble.tools
        marks = self._parsers.marks

        def checked(found: FoundCall) -> ToolCall | None:
            return _tool_call(found.name, found.arguments, tools, options)

        def parse(text: str) -> ParsedText:
            return self._found_calls(text, tools)

        call_ends = marks.call_ends if marks is not None else ()
        return CallReader(call_ends, parse, checked, None if options.parallel_calls else 1)

    def _found_calls(self, body: str, tools: Sequence[Tool]) -> ParsedText:
        """The calls that the model's parser finds; none if it fails on this text."""
        try:
            return self._parsers.split_calls(body, tools)
        except Exception as error:  # vLLM's parsers raise any error on a text that they do not expect
            _log_unreadable(error, body)
            return ParsedText("", body)

    def check_live(self, live: LiveAnswer | None, message: Message) -> None:
        """End what is released of this answer. If it does not begin with that, show no unfinished answers any more."""
        if live is None:
            return
        live.close()
        if self._shows_live and not live.released.begins(message):
            self._shows_live = False
            _LOG.error(
                "an answer differs from what was streamed of it; streams have answers in one piece from now on",
                shown=(live.thinking + live.text)[-200:],
                num_calls=len(live.calls),
            )

    def without_inlined_thinking(self, message: Message) -> Message:
        """An answer of a history whose client wrote its thinking into the text, as it was before that.

        Only a text that begins with the mark of thinking is changed, and nothing while the parsers are not loaded.
        """
        marks = self._parsers.marks
        text = message.text.lstrip()
        if marks is None or not marks.think_start or not marks.think_end:
            return message
        if not text.startswith(marks.think_start) or marks.think_end not in text:
            return message
        try:
            parsed = self._parsers.split_thinking(text)
        except Exception as error:  # vLLM's parsers raise any error on a text that they do not expect
            _log_unreadable(error, text)
            return message
        return replace(message, text=parsed.body, reasoning=parsed.reasoning) if parsed.reasoning else message

    def decode(self, ids: Ids | Sequence[int]) -> str:
        return self._renderer.tokenizer.decode(ids)

    async def num_ids_until_stop(self, ids: Ids, stop_sequences: Sequence[str]) -> int:
        """Return how many ids belong to the output: all up to the one that completes the first stop sequence."""
        if _cut(self.decode(ids), stop_sequences).stop_sequence is None:
            return len(ids)
        if len(ids) < _THREAD_FROM_TOKENS:
            return self._num_ids_with_stop(ids, stop_sequences)
        return await asyncio.to_thread(self._num_ids_with_stop, ids, stop_sequences)

    def _num_ids_with_stop(self, ids: Ids, stop_sequences: Sequence[str]) -> int:
        """A text that contains a stop sequence still does with more tokens, so the shortest one is found by halving."""
        return bisect_left(
            range(len(ids)),
            True,
            key=lambda num: _cut(self.decode(ids[:num]), stop_sequences).stop_sequence is not None,
        )

    async def count_reasoning_tokens(self, ids: Ids, output: ParsedOutput) -> int:
        """Return how many sampled ids are thinking, marks included.

        That is the shortest prefix of the ids that decodes to at least `reasoning_chars` characters.
        """
        if not output.reasoning_chars:
            return 0
        if len(ids) < _THREAD_FROM_TOKENS:
            return self._num_ids_for(ids, output.reasoning_chars)
        return await asyncio.to_thread(self._num_ids_for, ids, output.reasoning_chars)

    def _num_ids_for(self, ids: Ids, num_chars: int) -> int:
        return bisect_left(range(len(ids)), num_chars, key=lambda num: len(self.decode(ids[:num])))

    async def parse(
        self, text: str, request: ParsedRequest, stopped: bool, live: LiveAnswer | None = None
    ) -> ParsedOutput:
        """Parse thinking and tool calls of a sampled text. `stopped`: the model ended its answer with a stop token.
        `live`: what streams have shown of it, of which the calls are kept.

        The calls are those up to the first that is incomplete, names a tool that was not offered or is not chosen,
        lacks a required argument or violates a strict schema; what follows them is dropped. If the first is of that
        kind, or any of a parser that reads all calls at once, all of the output behind the thinking is returned as
        plain text; the agent then tells the model that it could not be read.

        No text makes this raise: the tokens are sampled already, and must be stored with an answer. If the parsers fail
        on a text, it is the answer as it is.
        """
        if live is not None:
            live.close()  # its calls may be read on in another thread
        options = request.options
        text, stop_sequence = _cut(text, options.stop_sequences)
        is_complete = stopped or stop_sequence is not None
        try:
            read = await self._read(text, request, is_complete, live)
        except Exception as error:
            _log_unreadable(error, text)
            read = _ReadText(Message("assistant", text), text)
        message = read.message
        finish: Finish = "stop_sequence" if stop_sequence is not None else "stop" if stopped else "length"
        if message.tool_calls and is_complete:
            finish = "tool_calls"
        reasoning_chars = len(text.removesuffix(read.body).rstrip("\n")) if message.reasoning else 0
        stop_sequence = stop_sequence if finish == "stop_sequence" else None
        return ParsedOutput(message, finish, stop_sequence, reasoning_chars, _violation(message, finish, options))

    async def _read(self, text: str, request: ParsedRequest, is_complete: bool, live: LiveAnswer | None) -> "_ReadText":
        tools = request.preamble.tools
        read: CallReader | None = None

        def calls_of(body: str) -> ParsedText:
            nonlocal read
            read = self._reader(request) if live is None or live.reader is None else live.reader
            if not read.has_read_a_beginning_of(body):
                read = self._reader(request)
            read.read_all(body)
            return self._found_calls(body, tools) if is_complete and not read.calls else ParsedText("", body)

        parsed = await self._parsers.split(text, calls_of if self._reads_calls(request) else None)
        if read is not None and read.calls:
            return _ReadText(Message("assistant", read.text, parsed.reasoning, read.calls), parsed.body)
        return _ReadText(_message(parsed, tools, request.options), parsed.body)

    def parse_endpoint(self, found: EndpointAnswer, request: ParsedRequest) -> ParsedOutput:
        """Parse an endpoint's answer. Its tool calls are judged like those of a sampled text, and become text as they
        do; a call that was cut is no JSON.
        """
        options = request.options
        text, stop_sequence = _cut(found.text, options.stop_sequences)
        stop_sequence = stop_sequence or (
            found.stop_sequence if found.stop_sequence in options.stop_sequences else None
        )
        calls = found.calls if options.tool_choice.allows_calls else ()
        called = "".join(f"\n{call.name}({call.arguments})" for call in calls)
        parsed = ParsedText(
            found.reasoning, (text + called).strip(), text, tuple(ParsedCall(one.name, one.arguments) for one in calls)
        )
        message = _message(parsed, request.preamble.tools, options)
        finish: Finish = "length" if found.finish == "length" else "stop"
        if message.tool_calls:
            finish = "tool_calls"
        elif stop_sequence is not None:
            finish = "stop_sequence"
        stop_sequence = stop_sequence if finish == "stop_sequence" else None
        return ParsedOutput(message, finish, stop_sequence, 0, _violation(message, finish, options))

    def token_logprobs(self, ids: Ids, logprobs: npt.NDArray[np.float32]) -> tuple[TokenLogprob, ...]:
        """Text and logprob of each sampled token."""
        return tuple(
            TokenLogprob(self.decode([one]), float(logprob))
            for one, logprob in zip(ids.tolist(), logprobs, strict=False)
        )


def _message(parsed: ParsedText, tools: Sequence[Tool], options: RequestOptions) -> Message:
    calls = tuple(
        call for one in parsed.calls if (call := _tool_call(one.name, one.arguments, tools, options)) is not None
    )
    if not calls or len(calls) < len(parsed.calls):
        return Message("assistant", parsed.body, parsed.reasoning)
    message = Message("assistant", parsed.content, parsed.reasoning, calls)
    return message if options.parallel_calls else replace(message, tool_calls=message.tool_calls[:1])


def _violation(message: Message, finish: Finish, options: RequestOptions) -> str | None:
    """Return how the answer violates the format that was asked for, None if it does not. Calls have no such format."""
    if options.output_schema is None or message.tool_calls:
        return None
    found = violation_of(message.text, dict(options.output_schema))
    return f"the answer was cut at its limit of tokens, and {found}" if found and finish == "length" else found


def _cut(text: str, stop_sequences: Sequence[str]) -> _CutText:
    """Cut before the first occurrence of a stop sequence."""
    found = min(((at, one) for one in stop_sequences if (at := text.find(one)) >= 0), default=None)
    return _CutText(text, None) if found is None else _CutText(text[: found[0]], found[1])


def _tool_call(name: str, arguments: str, tools: Sequence[Tool], options: RequestOptions) -> ToolCall | None:
    """Return the call with parsed arguments, or None if it is not valid."""
    try:
        return _checked_call(name, arguments, tools, options)
    except Exception as error:  # the arguments and the tool's schema may be anything
        _log_unreadable(error, arguments)
        return None


def _checked_call(name: str, arguments: str, tools: Sequence[Tool], options: RequestOptions) -> ToolCall | None:
    schema = next(
        (tool["function"].get("parameters") or {} for tool in tools if tool["function"].get("name") == name), None
    )
    if schema is None or not options.tool_choice.allows(name):
        return None
    try:
        values = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return None
    required = schema.get("required")
    if not isinstance(values, dict) or any(
        key not in values for key in (required if isinstance(required, list) else [])
    ):
        return None
    if name in options.tool_forms.strict and not matches_schema(values, schema):
        return None
    call = ToolCall(f"call_{uuid4().hex[:24]}", name, values)
    return call if can_be_stored(Message("assistant", "", tool_calls=(call,))) else None


def _log_unreadable(error: Exception, text: str) -> None:
    _LOG.error("an output cannot be read; it is returned as text", error=repr(error)[:200], text=text[-200:])
