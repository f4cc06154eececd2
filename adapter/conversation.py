"""Histories and answers in the one form that all dialects share, and the keys by which messages are compared.

Equality of messages decides which sampled ids are used for them, so it is defined in one place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import orjson

from ratchet.types import TurnKind, UnreadCause

Finish = Literal["stop", "length", "tool_calls", "stop_sequence"]
Tool = dict[str, Any]
_BLANKS = "".join(one for one in map(chr, range(0x3001)) if one.isspace()) + "\ufeff"
"""The characters that Python's `strip` removes, and the byte order mark, which JavaScript's `trim` removes, too."""


def tool_of(name: str, description: str, properties: Mapping[str, Any] | None = None, required: str = "") -> Tool:
    """A tool of our own, to try a template, a parser or an endpoint with. `required`: names, separated by spaces."""
    parameters: dict[str, Any] = {"type": "object", "properties": dict(properties or {})}
    if required:
        parameters["required"] = required.split()
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: Mapping[str, Any]


class UnreadCall(NamedTuple):
    """A tool call of a history whose arguments cannot be read, as of a client that keeps a part of a cut stream."""

    id: str
    name: str
    arguments: str

    @property
    def text(self) -> str:
        return f"{self.name}({self.arguments})"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a history. `role` is system, user, assistant or tool.

    Assistants have `reasoning` and `tool_calls`, tools have `tool_call_id`. `beside_tool`: a user's text that was sent
    in one message with a tool result, so that it is not a new question. `num_omitted`: images and files that the text
    only names (`dialects/media.py`). `unread_calls`: calls that cannot be read; they are in the text of the run.
    """

    role: str
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    beside_tool: bool = False
    num_omitted: int = 0
    unread_calls: tuple[UnreadCall, ...] = ()

    def for_template(self) -> dict[str, Any]:
        """The message in the form that Hugging Face chat templates take."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message

    def key(self, strict: bool = True) -> bytes:
        """16 bytes, equal for messages that are treated as the same one.

        1.0 and 1 are equal in arguments; the `tool_call_id` of a result is left out. If `strict`, the ids of tool calls
        count, because they distinguish equal samples; otherwise neither they nor outer whitespace count, numbers are
        equal if they are the same double, because JavaScript has no others, and a member that is null may be missing,
        because many clients leave such members out. Strict keys are stored, so they stay what they are.
        """
        calls = [[call.id if strict else "", call.name, _alike(call.arguments, strict)] for call in self.tool_calls]
        text = self.text if strict else self.text.strip(_BLANKS)
        reasoning = self.reasoning if strict else self.reasoning.strip(_BLANKS)
        return _hash(orjson.dumps([self.role, text, reasoning, calls, self.beside_tool], option=orjson.OPT_SORT_KEYS))


class ShownText(NamedTuple):
    """The part of an answer that a stream has before the answer is stored. Text follows only after all thinking."""

    thinking: str = ""
    text: str = ""

    def begins(self, answer: Message) -> bool:
        """Return whether the answer begins with the shown text."""
        if self.text and answer.reasoning != self.thinking:
            return False
        return answer.reasoning.startswith(self.thinking) and answer.text.startswith(self.text)


class NamespacedName(NamedTuple):
    """A tool of a namespace: the model sees both names as one (`flat`), the client gets them apart."""

    namespace: str
    name: str

    @property
    def flat(self) -> str:
        return f"{self.namespace}__{self.name}"


@dataclass(frozen=True, slots=True)
class ToolForms:
    """Properties of tools that the templates' form of a tool lacks, by the name that the model sees.

    `strict`: tools whose arguments must match their schema. `custom`: tools that take plain text. `namespaces`: tools
    of a namespace.
    """

    strict: frozenset[str] = frozenset()
    custom: frozenset[str] = frozenset()
    namespaces: Mapping[str, NamespacedName] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preamble:
    """The prompt before the first message: system text, and tools in OpenAI's function form, as templates take them."""

    system: str
    tools: tuple[Tool, ...]
    key: bytes
    forms: ToolForms = field(default_factory=ToolForms)

    @staticmethod
    def of(system: str, tools: Sequence[Tool], forms: ToolForms | None = None) -> "Preamble":
        key = _hash(orjson.dumps([system, tools], option=orjson.OPT_SORT_KEYS))
        return Preamble(system, tuple(tools), key, forms or ToolForms())

    def messages(self, runs: "Sequence[MessageRun]" = ()) -> list[Message]:
        """Return the system text as a message, if there is one, and the messages of the runs behind it."""
        opening = [Message("system", self.system)] if self.system else []
        return [*opening, *(message for run in runs for message in run.messages)]


@dataclass(frozen=True, slots=True)
class MessageRun:
    """Consecutive messages of one side: one message of the assistant's, or messages of all other roles.

    `loose_key`: an answer's without tool-call ids and outer whitespace; it is used only if no message has the strict
    key. All other messages have no loose key of their own: their text stands in the prompt as it was sent.
    """

    assistant: bool
    messages: tuple[Message, ...]
    key: bytes
    loose_key: bytes

    @property
    def call_ids(self) -> tuple[str, ...]:
        """Ids of its tool calls; empty for messages of other roles."""
        return tuple(call.id for call in self.messages[0].tool_calls) if self.assistant else ()

    @property
    def unread_ids(self) -> frozenset[str]:
        """Ids of its calls that became text. Their results become text, too."""
        ids = {call.id for call in self.messages[0].unread_calls} if self.assistant else set()
        return frozenset(ids.difference(self.call_ids))

    def with_reasoning(self, reasoning: str) -> "MessageRun":
        """The run of one assistant message with this reasoning. Its unread calls are in its text already."""
        message = replace(self.messages[0], reasoning=reasoning)
        return MessageRun(True, (message,), message.key(), message.key(strict=False))

    @staticmethod
    def of(messages: Sequence[Message]) -> "MessageRun":
        if messages[0].role == "assistant":
            message = _with_unread_calls(_merged(messages))
            return MessageRun(True, (message,), message.key(), message.key(strict=False))
        key = _hash(b"".join(message.key() for message in messages))
        return MessageRun(False, tuple(messages), key, key)


def _merged(messages: Sequence[Message]) -> Message:
    """Merge consecutive assistant messages into one, as the vendors do."""
    if len(messages) == 1:
        return messages[0]
    calls = tuple(call for message in messages for call in message.tool_calls)
    reasoning = "\n".join(message.reasoning for message in messages if message.reasoning)
    unread = tuple(call for message in messages for call in message.unread_calls)
    text = "".join(message.text for message in messages)
    return replace(messages[0], text=text, reasoning=reasoning, tool_calls=calls, unread_calls=unread)


def _with_unread_calls(message: Message) -> Message:
    """The message with its unread calls as text, as an answer has a call that cannot be read."""
    if not message.unread_calls:
        return message
    return replace(message, text="\n".join([message.text, *(call.text for call in message.unread_calls)]).strip())


def extend_key(prefix: bytes, run_key: bytes) -> bytes:
    """The key of a history with one run more. The key of an empty history is its preamble's."""
    return _hash(prefix + run_key)


class ToolChoice(NamedTuple):
    """The tools whose calls are forwarded to the client.

    `allowed`: their names; None: all that are offered. `required`: the client asks for a call; the answer may have none
    all the same. `sent`: the choice as the client wrote it.
    """

    allowed: frozenset[str] | None = None
    required: bool = False
    sent: Any = "auto"

    @property
    def allows_calls(self) -> bool:
        return self.allowed is None or bool(self.allowed)

    def allows(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The fields of a request beside its history. Sampling is set by the run; only `max_tokens` and `stop_sequences`
    reach the engine, which end an answer earlier.

    `max_tokens`: None if the client sets no limit. `lane`: names the sub-agent that calls, "" for the main agent.
    `retry`: the SDK's header marks the request as a retry. `tool_forms`: those of the preamble.
    `call_key`: digest of the client's `Idempotency-Key`. `logprobs`: return those of the sampled tokens.
    `output_schema`: JSON schema of the answer's text, None: any text.
    """

    dialect: str
    model: str = "policy"
    max_tokens: int | None = None
    stream: bool = False
    lane: str = ""
    kind: TurnKind = TurnKind.MAIN
    retry: bool = False
    include_usage: bool = False
    stop_sequences: tuple[str, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_calls: bool = True
    tool_forms: ToolForms = field(default_factory=ToolForms)
    logprobs: bool = False
    output_schema: Mapping[str, Any] | None = None
    call_key: str = ""


class TokenLogprob(NamedTuple):
    """A sampled token's text and logprob, for a client that asks for it."""

    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it is stored.

    Dialects write it from these fields and the request's options, so that a retry gets the same content; a stream has a
    random id of its own.

    `created`: Unix seconds. `cached_tokens`: prompt tokens that the engine had in its prefix cache. `stop_sequence`:
    the one that ended the text. `thinks`: a later question may make the template drop this answer's thinking.
    `violation`: how the text violates the format that was asked for. `logprobs`: of all sampled tokens, if asked for.
    `asked`: the options that it was made for (`turns/call_options.py`). `unread`: see `output_parser.ParsedOutput`; it
    has a column of its own.
    """

    turn_id: int
    message: Message
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    created: int = 0
    cached_tokens: int = 0
    stop_sequence: str | None = None
    thinks: bool = False
    reasoning_tokens: int = 0
    violation: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    asked: Mapping[str, Any] | None = None
    unread: UnreadCause | None = None


_STORED_AS_THEY_ARE = (
    "finish", "prompt_tokens", "completion_tokens", "created", "cached_tokens", "stop_sequence", "thinks",
    "reasoning_tokens", "asked",
)  # fmt: skip
"""Fields of an answer that are JSON."""


def message_from_json(value: dict[str, Any]) -> Message:
    calls = [
        ToolCall(one["id"], one["function"]["name"], one["function"]["arguments"])
        for one in value.get("tool_calls", [])
    ]
    return Message(
        value["role"],
        value.get("content") or "",
        value.get("reasoning_content", ""),
        tuple(calls),
        value.get("tool_call_id", ""),
    )


def can_be_stored(message: Message) -> bool:
    """Return whether a message can be stored and compared; False if its arguments are nested too deeply.

    Rows of requests have messages in more levels than rows of answers, and clients send answers back.
    """
    try:
        orjson.dumps({"messages": [message.for_template()]})
        message.key()
        message.key(strict=False)
    except TypeError:
        return False
    return True


def answer_to_json(answer: Answer) -> dict[str, Any]:
    return {
        "message": answer.message.for_template(),
        **{name: getattr(answer, name) for name in _STORED_AS_THEY_ARE},
        **({"violation": answer.violation} if answer.violation else {}),
        **({"logprobs": [list(one) for one in answer.logprobs]} if answer.logprobs else {}),
    }


def answer_from_json(turn_id: int, value: dict[str, Any]) -> Answer:
    fields = {name: value[name] for name in value if name not in ("message", "logprobs")}
    logprobs = tuple(TokenLogprob(*one) for one in value.get("logprobs", ()))
    return Answer(turn_id, message_from_json(value["message"]), logprobs=logprobs, **fields)


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _alike(value: Any, strict: bool) -> Any:
    """The value as clients may send it back: with 1.0 as 1, because JavaScript has no other form.

    If not `strict`, with each number as a double, and without members that are null.
    """
    match value:
        case bool():
            return value
        case int() | float() if not strict:
            return _double(value)
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case Mapping():
            return {key: _alike(item, strict) for key, item in value.items() if strict or item is not None}
        case list():
            return [_alike(item, strict) for item in value]
    return value


def _double(number: float) -> float | str:
    """The nearest double, and 0 for the zero with a sign; a name for an integer beyond the largest double."""
    try:
        return float(number) or 0.0
    except OverflowError:
        return "Infinity" if number > 0 else "-Infinity"
