"""Parse sampled ids into the assistant's message that the client gets.

Tool choice and strict schemas act here, on the text. If they reached the sampler, they would change what the recorded
logprobs mean. Stop sequences end the generation in the engine, which changes no logprob. The output ends with the token
that completes one, and the text before the stop sequence. That token is kept whole, even if its text goes on behind the
stop sequence: it was sampled as one action, and no part of it can be a target or a context of its own.
"""

import asyncio
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import orjson
import structlog

from adapter.argument_types import exact_json, required_arguments
from adapter.conversation import Finish, Message, RequestOptions, TokenLogprob, Tool, ToolCall, can_be_stored, tool_of
from adapter.endpoint import EndpointAnswer
from adapter.live_answer import LiveAnswer
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import ParsedRequest
from adapter.structured_output import matches_schema, violation_of
from adapter.vllm_parsers import ParsedCall, VllmParsers
from adapter.written_calls import WrittenCalls
from ratchet.types import UnreadCause
from store.arrays import Ids

_LOG = structlog.get_logger("ratchet.adapter")
_THREAD_FROM_TOKENS = 500  # decoding fewer a dozen times takes a few milliseconds
_MOST_ENDS = 4
"""End marks at which the end of one call is looked for. Each costs two parses, and a model may repeat one until its
limit."""


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A sampled text as an assistant's message.

    `stop_sequence`: the one that ended the text. `reasoning_chars`: length of the thinking and its end mark in the
    text. `violation`: how the text violates the format that was asked for. `unread`: why a call of the text is not one
    of the message.
    """

    message: Message
    finish: Finish
    stop_sequence: str | None = None
    reasoning_chars: int = 0
    violation: str | None = None
    unread: UnreadCause | None = None


class _CutText(NamedTuple):
    """A text and the stop sequence at which it was cut, None if it is whole."""

    text: str
    stop_sequence: str | None


class _ReadText(NamedTuple):
    """A text as a message. `body`: what follows its thinking. `unread`: as in `ParsedOutput`."""

    message: Message
    body: str
    unread: UnreadCause | None = None


class _FoundCalls(NamedTuple):
    """Calls that fit their tools, and the text before. `are_all`: no others. `unread`: why the first other is none."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    are_all: bool = False
    unread: UnreadCause | None = None


class OutputParser:
    """`num_unlike_shown`: answers that did not begin with what their streams had shown of them, all of them bugs."""

    def __init__(self, renderer: Renderer, parsers: VllmParsers) -> None:
        self.num_unlike_shown = 0
        self._renderer = renderer
        self._parsers = parsers
        self.written = WrittenCalls(renderer)

    def live_answer(self, request: ParsedRequest) -> LiveAnswer | None:
        """Return what a stream shows while the answer is sampled; None if nothing can be shown."""
        marks = self._parsers.marks
        if marks is None:
            return None
        tokenizer = self._renderer.tokenizer.plain
        stop_sequences = request.options.stop_sequences
        return LiveAnswer(tokenizer, self._renderer.stop_ids, marks, stop_sequences, self._reads_calls(request))

    def take(self, request: ParsedRequest) -> None:
        """Make what the parsers need of a request, before its row is opened: afterwards no error is the client's.

        While the parsers are not loaded yet, nothing is made. Raises InvalidRequestError.
        """
        if self._reads_calls(request):
            self._parsers.take_tools(request.preamble.tools)

    def _reads_calls(self, request: ParsedRequest) -> bool:
        has_tools = self._parsers.tool_parser is not None and bool(request.preamble.tools)
        return has_tools and request.options.tool_choice.allows_calls

    def check_live(self, live: LiveAnswer | None, message: Message) -> None:
        """Count an answer that does not begin with what was shown of it."""
        if live is not None and not live.released.begins(message):
            self.num_unlike_shown += 1
            _LOG.error(
                "an answer differs from what was streamed of it; its streams fail, and a retry gets it",
                shown=(live.thinking + live.text)[-200:],
                so_far=self.num_unlike_shown,
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
        return await self._num_ids(ids, lambda text: _cut(text, stop_sequences).stop_sequence is not None)

    async def count_reasoning_tokens(self, ids: Ids, output: ParsedOutput) -> int:
        """Return how many ids decode to `reasoning_chars` characters of thinking or more, marks included."""
        if not output.reasoning_chars:
            return 0
        return await self._num_ids(ids, lambda text: len(text) >= output.reasoning_chars)

    async def _num_ids(self, ids: Ids, is_enough: Callable[[str], bool]) -> int:
        """Return how many ids have a text that is enough. With more tokens it still is, so it is found by halving."""

        def found() -> int:
            return bisect_left(range(len(ids)), True, key=lambda num: is_enough(self.decode(ids[:num])))

        return found() if len(ids) < _THREAD_FROM_TOKENS else await asyncio.to_thread(found)

    async def parse(self, text: str, request: ParsedRequest, stopped: bool) -> ParsedOutput:
        """Parse thinking and tool calls of a sampled text. `stopped`: the model ended its answer with a stop token.

        The calls are those up to the first that is incomplete, names a tool that was not offered or is not chosen,
        lacks a required argument or violates a strict schema; what follows them is dropped. If the first is of that
        kind, or any of a parser that reads all calls at once, all of the output behind the thinking is returned as
        plain text; the agent then tells the model that it could not be read.

        No text makes this raise: the tokens are sampled already, and must be stored with an answer. If the parsers fail
        on a text, it is the answer as it is.
        """
        options = request.options
        text, stop_sequence = _cut(text, options.stop_sequences)
        is_complete = stopped or stop_sequence is not None
        try:
            read = await self._read(text, request, is_complete)
        except Exception as error:
            _log_unreadable(error, text)
            read = _ReadText(Message("assistant", text), text, UnreadCause.NO_PARSER)
        message = read.message
        finish: Finish = "stop_sequence" if stop_sequence is not None else "stop" if stopped else "length"
        if message.tool_calls and is_complete:
            finish = "tool_calls"
        reasoning_chars = len(text.removesuffix(read.body).rstrip("\n")) if message.reasoning else 0
        stop_sequence = stop_sequence if finish == "stop_sequence" else None
        violation = _violation(message, finish, options)
        return ParsedOutput(message, finish, stop_sequence, reasoning_chars, violation, read.unread)

    async def _read(self, text: str, request: ParsedRequest, is_complete: bool) -> _ReadText:
        if self._parsers.reasoning_parser is None and not self._reads_calls(request):
            return _ReadText(Message("assistant", text), text)
        return await self._parsers.run(partial(self._split, text, request, is_complete), len(text))

    def _split(self, text: str, request: ParsedRequest, is_complete: bool) -> _ReadText:
        parsed = self._parsers.split_thinking(text)
        found = self._read_calls(parsed.body, request, is_complete) if self._reads_calls(request) else _FoundCalls()
        calls = found.calls if request.options.parallel_calls else found.calls[:1]
        text = found.text if calls else parsed.body
        return _ReadText(Message("assistant", text, parsed.reasoning, calls), parsed.body, found.unread)

    def _read_calls(self, body: str, request: ParsedRequest, is_complete: bool) -> _FoundCalls:
        """Read one call after the other, each up to an end mark behind which no text changes it.

        So a call that cannot be read costs none before it, with which some parsers would fail. An end mark inside of an
        argument ends no call. A call with too many of them is read at once with all that follows it.
        """
        marks = self._parsers.marks
        ends = "|".join(map(re.escape, marks.call_ends if marks else ())) or r"(?!)"
        text = ""
        calls: tuple[ToolCall, ...] = ()
        unread: UnreadCause | None = None
        begin = num_ends = 0
        for end in (match.end() for match in re.finditer(ends, body)):
            num_ends += 1
            is_last = num_ends == _MOST_ENDS
            is_over = is_complete and begin == 0 and end == len(body)  # one call that ends the answer is read once
            found = self._find_calls(body[begin : None if is_last else end], request, is_over)
            unread = found.unread or unread or UnreadCause.NO_PARSER
            if found.calls and (is_last or found.are_all):
                text = text if calls else found.text
                calls += found.calls
                begin = len(body) if is_last else end
                num_ends = 0
                unread = found.unread
            if is_last or (calls and not request.options.parallel_calls):
                break
        begins = "|".join(map(re.escape, (marks.tool_marks if marks else None) or ())) or r"(?!)"
        behind, *others = re.split(ends, body[begin:])
        if calls and "".join([behind, *others]).strip() and others and not re.search(begins, behind):
            return _FoundCalls(unread=UnreadCause.CHANGED)  # what ended the last call was a part of a value
        if is_complete and unread is None and re.search(begins, behind):
            unread = UnreadCause.NO_PARSER
        if calls or not is_complete:
            return _FoundCalls(text, calls, unread=unread)
        whole = self._find_calls(body, request, is_over=True)
        return whole if whole.calls and whole.are_all else _FoundCalls(unread=whole.unread or unread)

    def _find_calls(self, text: str, request: ParsedRequest, is_over: bool) -> _FoundCalls:
        """The calls that the model's parser finds; none if it fails on this text, or has changed what was written.

        Unless the text `is_over`, only those that text behind it would not change.
        """
        tools = request.preamble.tools
        try:
            found = self._parsers.split_calls(text, tools)
            later = found if is_over or not found.calls else self._parsers.split_calls(text + "x", tools)
        except Exception as error:  # vLLM's parsers raise any error on a text that they do not expect
            _log_unreadable(error, text)
            return _FoundCalls(unread=UnreadCause.NO_PARSER)
        unchanged = takewhile(lambda pair: pair[0] == pair[1], zip(found.calls, later.calls, strict=False))
        fitting = _fitting([one for one, _ in unchanged], tools, request.options)
        are_all = len(fitting.calls) == len(found.calls) == len(later.calls)
        if are_all and fitting.calls and self.compares_calls:
            behind = text.partition(found.content)[2] if found.content else text
            if not self.written.are(behind, fitting.calls, found.arguments):
                return _FoundCalls(unread=UnreadCause.CHANGED)
        return _FoundCalls(found.content, fitting.calls, are_all, fitting.unread)

    @cached_property
    def compares_calls(self) -> bool:
        """Return whether the tool parser reads the calls that the template writes; another's cannot be compared."""
        sample, call = self.written.sample, self.written.sample_call
        if sample is None:
            return False
        try:
            found = self._parsers.split_calls(sample, (tool_of(call.name, ""),)).calls
            reads = [(one.name, orjson.loads(one.arguments)) for one in found] == [(call.name, call.arguments)]
        except Exception:  # a parser of another model raises any error
            reads = False
        if not reads:
            _LOG.warning("calls are not compared with their text: the tool parser does not fit the chat template")
        return reads

    def parse_endpoint(self, found: EndpointAnswer, request: ParsedRequest) -> ParsedOutput:
        """Parse an endpoint's answer. Its tool calls are judged like those of a sampled text, and become text as they
        do; a call that was cut is no JSON."""
        options = request.options
        text, stop_sequence = _cut(found.text, options.stop_sequences)
        stop_sequence = stop_sequence or (
            found.stop_sequence if found.stop_sequence in options.stop_sequences else None
        )
        calls = found.calls if options.tool_choice.allows_calls else ()
        judged = _fitting(calls, request.preamble.tools, options)
        fitting = judged.calls
        if not fitting or len(fitting) < len(calls):
            text = "".join([text, *(f"\n{call.name}({call.arguments})" for call in calls)]).strip()
            fitting = ()
        fitting = fitting if options.parallel_calls else fitting[:1]
        message = Message("assistant", text, found.reasoning, fitting)
        finish: Finish = "length" if found.finish == "length" else "stop"
        if message.tool_calls:
            finish = "tool_calls"
        elif stop_sequence is not None:
            finish = "stop_sequence"
        stop_sequence = stop_sequence if finish == "stop_sequence" else None
        return ParsedOutput(message, finish, stop_sequence, 0, _violation(message, finish, options), judged.unread)

    async def write(self, message: Message, request: ParsedRequest) -> Ids | UnreadCause:
        """Return the ids with which the model would give an endpoint's answer; their text must be read as the same
        message, in which only ids of calls, outer white space and members that are null may differ."""
        ids = await asyncio.to_thread(self._renderer.written, request.preamble, request.runs, message)
        if len(ids):
            read = await self.parse(self.decode(ids[:-1]), request, stopped=True)
            if read.message.key(strict=False) == message.key(strict=False):
                return ids
        return UnreadCause.ENDPOINT_UNWRITTEN

    def token_logprobs(self, ids: Ids, logprobs: npt.NDArray[np.float32]) -> tuple[TokenLogprob, ...]:
        """Text and logprob of each sampled token."""
        return tuple(
            TokenLogprob(self.decode([one]), float(logprob))
            for one, logprob in zip(ids.tolist(), logprobs, strict=False)
        )


def _fitting(found: Sequence[ParsedCall], tools: Sequence[Tool], options: RequestOptions) -> _FoundCalls:
    """The calls before the first that does not fit its tool."""
    calls: list[ToolCall] = []
    try:
        for one in found:
            checked = _checked_call(one.name, one.arguments, tools, options)
            if isinstance(checked, UnreadCause):
                return _FoundCalls(calls=tuple(calls), unread=checked)
            calls.append(checked)
    except Exception as error:  # the arguments and the tool's schema may be anything
        _log_unreadable(error, found[len(calls)].arguments)
        return _FoundCalls(calls=tuple(calls), unread=UnreadCause.ARGUMENTS)
    return _FoundCalls(calls=tuple(calls), are_all=True)


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


def _checked_call(name: str, arguments: str, tools: Sequence[Tool], options: RequestOptions) -> ToolCall | UnreadCause:
    """The call with parsed arguments, or why it does not fit its tool."""
    schema = next(
        (tool["function"].get("parameters") or {} for tool in tools if tool["function"].get("name") == name), None
    )
    if schema is None or not options.tool_choice.allows(name):
        return UnreadCause.NOT_OFFERED
    try:
        values = exact_json(arguments or "{}")
    except (ValueError, RecursionError):
        return UnreadCause.ARGUMENTS
    fits = isinstance(values, dict) and all(key in values for key in required_arguments(schema))
    if not fits or (name in options.tool_forms.strict and not matches_schema(values, schema)):
        return UnreadCause.ARGUMENTS
    call = ToolCall(f"call_{uuid4().hex[:24]}", name, values)
    return call if can_be_stored(Message("assistant", "", tool_calls=(call,))) else UnreadCause.ARGUMENTS


def _log_unreadable(error: Exception, text: str) -> None:
    _LOG.error("an output cannot be read; it is returned as text", error=repr(error)[:200], text=text[-200:])
