"""The interface of a wire protocol (`Dialect`), and the failures that each protocol expresses in its vendor's form.

A new protocol is a new file in this folder and a route in `adapter/app.py`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import orjson

if TYPE_CHECKING:
    from adapter.dialects.fields import FieldRule

from adapter.conversation import (
    Answer,
    Message,
    Preamble,
    RequestOptions,
    ShownText,
    Tool,
    ToolCall,
    ToolForms,
    UnreadCall,
)
from ratchet.types import TurnKind

Fields = dict[str, msgspec.Raw]
"""The top-level fields of a request's body, each as its bytes."""

MAX_STOPS = 64
MAX_STOP_CHARS = 1000

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class Failure(StrEnum):
    """The reason why a request got no answer. Clients retry only `timed_out`, `unavailable` and `internal`."""

    INVALID = "invalid"
    STATE_NOT_KEPT = "state_not_kept"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOO_LARGE = "too_large"
    TIMED_OUT = "timed_out"
    UNAUTHORISED = "unauthorised"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_ROUTE = "unknown_route"
    TURN_LIMIT = "turn_limit"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class InvalidRequestError(ValueError):
    """The request cannot be served; the message names the part of it and the reason."""


class StateNotKeptError(InvalidRequestError):
    """The request refers to a conversation that the vendor's servers would keep."""


class PreambleContent(NamedTuple):
    system: str
    tools: list[Tool]
    forms: ToolForms


class CallIds(NamedTuple):
    """Ids of the calls that an item has `made`, and of the one `answered`. `has_text`: it has more than calls."""

    made: tuple[str, ...] = ()
    answered: str = ""
    has_text: bool = False


class HttpFailure(NamedTuple):
    status: int
    body: bytes


class SseWriter(Protocol):
    """One answer as server-sent events: `opening`, `ping` and `growth` while it is sampled, then `closing` or `failed`.

    `shown`: what `growth` has written.
    """

    shown: ShownText

    def opening(self, prompt_tokens: int) -> bytes: ...

    def ping(self) -> bytes: ...

    def growth(self, turn_id: int, grown: ShownText) -> bytes:
        """The events that complete what was shown to `grown`, which begins with it; empty if nothing is new."""

    def closing(self, answer: Answer) -> bytes:
        """The rest of the answer behind what was shown, with all calls: agents run them, so the turn is committed."""

    def failed(self, failure: Failure, message: str) -> bytes: ...


class Dialect(Protocol):
    """A wire protocol.

    `rules`: what becomes of each field. `history` names the field with the messages, `preamble_fields` those with
    system text and tools. `too_long_in_stream`: if a stream was asked for, clients expect "prompt too long" as an
    event.
    """

    name: str
    rules: "Mapping[str, FieldRule]"
    history: str
    preamble_fields: tuple[str, ...]
    too_long_in_stream: bool

    def items(self, history: msgspec.Raw | None) -> list[msgspec.Raw]:
        """The messages one by one. Raises InvalidRequestError if there is none, or msgspec's errors."""
        items = [] if history is None else _ITEMS.decode(history)
        if not items:
            raise InvalidRequestError(f"{self.history}: at least one message expected")
        return items

    def is_answer(self, item: msgspec.Raw) -> bool:
        """Return whether the item is an assistant's message or part of one."""
        return bool(role_of(item).role == "assistant")

    def call_ids(self, item: msgspec.Raw) -> CallIds:
        """Return the calls that an item makes or answers; none if the protocol's answers are never in several items."""
        return CallIds()

    def preamble(self, fields: Fields) -> PreambleContent:
        """Parse system text and tools. Raises InvalidRequestError."""

    def messages(self, items: Sequence[Any], first: int) -> list[Message]:
        """Parse items of one side to at least one message; `first`: number of items[0]. Raises InvalidRequestError."""

    def options(self, fields: Fields, headers: Mapping[str, str], preamble: Preamble) -> RequestOptions:
        """Parse all fields but preamble and history, and the headers. Raises InvalidRequestError."""

    def reply(self, options: RequestOptions, answer: Answer) -> bytes: ...

    def stream(self, options: RequestOptions) -> SseWriter: ...

    def failure(self, failure: Failure, message: str) -> HttpFailure: ...


class _StreamField(msgspec.Struct):
    stream: bool = False


_STREAM_FIELD = msgspec.json.Decoder(_StreamField)


def asks_for_stream(body: bytes) -> bool:
    """Return whether a body, which may have any content, asks for a stream."""
    try:
        return _STREAM_FIELD.decode(body).stream
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


class ItemRole(msgspec.Struct):
    role: Any = None
    type: Any = None


_ITEM_ROLE = msgspec.json.Decoder(ItemRole)


def role_of(item: msgspec.Raw) -> ItemRole:
    """Role and type of an item, without parsing the rest of it. Raises InvalidRequestError if it is not an object."""
    try:
        return _ITEM_ROLE.decode(item)
    except msgspec.ValidationError:
        raise InvalidRequestError("messages must be objects") from None


class _MadeCall(msgspec.Struct):
    id: str


class CallItem(msgspec.Struct):
    """The members by which an item of the history makes or answers calls, in any of OpenAI's protocols."""

    role: str | None = None
    type: str | None = None
    content: Any = None
    tool_calls: list[_MadeCall] | None = None
    tool_call_id: str | None = ""
    call_id: str | None = ""


_CALL_ITEM = msgspec.json.Decoder(CallItem)


def call_item(item: msgspec.Raw) -> CallItem:
    """These members of an item; an item of another form has none."""
    try:
        return _CALL_ITEM.decode(item)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return CallItem()


def event(data: object, name: str = "") -> bytes:
    prefix = b"event: " + name.encode() + b"\n" if name else b""
    return prefix + b"data: " + orjson.dumps(data) + b"\n\n"


def field_at(fields: Fields, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A top-level field, parsed; `default` if it is missing or null. Raises InvalidRequestError for another type."""
    raw = fields.get(name)
    if raw is None:
        return default
    try:
        value = orjson.loads(memoryview(raw))
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{name}: {error}") from error
    return _checked(value, name, kind, default)


def field_of(
    body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None, where: str = ""
) -> Any:
    """`body[name]`, `default` if missing or null. InvalidRequestError for another type; `where` names the object."""
    return _checked(body.get(name), f"{where}.{name}" if where else name, kind, default)


def _checked(value: Any, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise InvalidRequestError(f"{name}: {_kind_name(kind)} expected, got {type(value).__name__}")
    return value


def _kind_name(kind: type | tuple[type, ...]) -> str:
    names = {dict: "an object", list: "an array", str: "a string", int: "an integer", bool: "a boolean"}
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(names.get(one, one.__name__) for one in kinds)


def object_at(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where}: an object expected, got {type(value).__name__}")
    return value


def called(call_id: Any, name: Any, arguments: Any) -> ToolCall | UnreadCall:
    """A tool call of a history. `arguments`: an object, which OpenAI's protocols send as JSON in a string.

    A client whose stream was cut may send the beginning of a call for as long as its conversation lasts, so arguments
    that cannot be read are no error.
    """
    call_id, name = str(call_id or ""), str(name or "")
    try:
        values = orjson.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        values = arguments
    if values is None:
        values = {}
    if isinstance(values, dict):
        return ToolCall(call_id, name, values)
    return UnreadCall(call_id, name, arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode())


def assistant_message(text: str, reasoning: str, calls: Sequence[ToolCall | UnreadCall]) -> Message:
    read = tuple(call for call in calls if isinstance(call, ToolCall))
    unread = tuple(call for call in calls if isinstance(call, UnreadCall))
    return Message("assistant", text, reasoning, read, unread_calls=unread)


def common_options(dialect: str, fields: Fields, headers: Mapping[str, str], lane: str, limit: str) -> RequestOptions:
    """The options that every protocol has. `limit`: the field with the limit of tokens. Raises InvalidRequestError."""
    return RequestOptions(
        dialect=dialect,
        model=field_at(fields, "model", str, ""),
        max_tokens=_positive(field_at(fields, limit, int), limit),
        stream=field_at(fields, "stream", bool, False),
        lane=lane,
        kind=TurnKind.SUB_AGENT if lane else TurnKind.MAIN,
        # Both vendors' SDKs count their attempts in this header.
        retry=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
        call_key=_call_key_of(headers),
    )


def _positive(value: int | None, name: str) -> int | None:
    """Return a limit of tokens. Raises InvalidRequestError below 1."""
    if value is not None and value < 1:
        raise InvalidRequestError(f"{name}: must be at least 1, got {value}")
    return value


def stops_of(values: str | list[Any], name: str) -> tuple[str, ...]:
    """Return stop sequences; empty ones, which would stop nothing, are left out. Raises InvalidRequestError."""
    stops = [values] if isinstance(values, str) else values
    if len(stops) > MAX_STOPS or any(not isinstance(one, str) or len(one) > MAX_STOP_CHARS for one in stops):
        raise InvalidRequestError(
            f"{name}: at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters expected"
        )
    return tuple(one for one in stops if one)


def _call_key_of(headers: Mapping[str, str]) -> str:
    """The digest of the client's name for the call, "" without one. It has any length, and is stored."""
    key = headers.get("idempotency-key", "")
    return blake2b(key.encode(), digest_size=16).hexdigest() if key else ""
