"""What a wire protocol has to provide, and the one table of failures that each of them words in its vendor's way.

Why here: the app, the capture and the token code know no protocol; a new one is a new file beside this.
Called by: `messages.py`, `chat.py` and `responses.py` (implement it), `app.py`, `reading.py` and `replies.py` (use it).
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import orjson

from adapter.conversation import Answer, Message, RequestOptions, Tool

Fields = dict[str, msgspec.Raw]
"""A request's top level: each field's bytes as they came."""

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class Failure(StrEnum):
    """Why a request got no answer. The vendors' SDKs and agents retry `unavailable` and `internal`, and nothing else."""

    INVALID = "invalid"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOO_LARGE = "too_large"
    UNAUTHORISED = "unauthorised"
    UNKNOWN_MODEL = "unknown_model"
    TURN_LIMIT = "turn_limit"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class InvalidRequestError(ValueError):
    """The request cannot be served; the message says which part of it and why."""


class SseWriter(Protocol):
    """One answer as server-sent events: `opening`, `ping` while the model thinks, then `closing` or `failed`."""

    def opening(self, prompt_tokens: int) -> bytes: ...

    def ping(self) -> bytes: ...

    def closing(self, answer: Answer) -> bytes: ...

    def failed(self, failure: Failure, message: str) -> bytes: ...


class Dialect(Protocol):
    """Bytes in, bytes out. `history` names the field with the messages, `head_fields` those that stand before all of them.

    `too_long_in_stream`: where a stream was asked for, its clients look for this one failure in the stream, not in the status.
    """

    name: str
    history: str
    head_fields: tuple[str, ...]
    too_long_in_stream: bool

    def items(self, history: msgspec.Raw | None) -> list[msgspec.Raw]:
        """The messages one by one. Raises InvalidRequestError or msgspec's errors."""
        ...

    def is_answer(self, item: msgspec.Raw) -> bool:
        """Whether it is (part of) an assistant's message."""
        ...

    def head(self, fields: Fields) -> tuple[str, list[Tool]]:
        """System text and tools. Raises InvalidRequestError."""
        ...

    def messages(self, items: Sequence[Any], first: int) -> list[Message]:
        """A run of items of one side, the first of which is number `first` of the history. Never empty. Raises InvalidRequestError."""
        ...

    def wishes(self, fields: Fields, headers: Mapping[str, str]) -> RequestOptions:
        """Raises InvalidRequestError."""
        ...

    def reply(self, wishes: RequestOptions, answer: Answer) -> bytes:
        """The whole answer as one JSON body."""
        ...

    def stream(self, wishes: RequestOptions) -> SseWriter: ...

    def failure(self, failure: Failure, message: str) -> tuple[int, bytes]:
        """HTTP status and body."""
        ...


class _Side(msgspec.Struct):
    role: Any = None
    type: Any = None


_SIDE = msgspec.json.Decoder(_Side)


def role_of(item: msgspec.Raw) -> _Side:
    """Role and type of an item, without reading the rest of it. Raises InvalidRequestError where it is no object."""
    try:
        return _SIDE.decode(item)
    except msgspec.ValidationError:
        raise InvalidRequestError("messages must be objects") from None


def items_of(name: str, history: msgspec.Raw | None) -> list[msgspec.Raw]:
    """Raises InvalidRequestError where there is none."""
    items = [] if history is None else _ITEMS.decode(history)
    if not items:
        raise InvalidRequestError(f"{name}: at least one message expected")
    return items


def event(data: object, name: str = "") -> bytes:
    """One server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def field_at(fields: Fields, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A top-level field, parsed, if it has the right type; `default` where it is missing or null. Raises InvalidRequestError."""
    raw = fields.get(name)
    if raw is None:
        return default
    try:
        value = orjson.loads(memoryview(raw))
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{name}: {error}") from error
    return _checked(value, name, kind, default)


def field_of(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """`body[name]` if it has the right type, `default` where it is missing or null. Raises InvalidRequestError."""
    return _checked(body.get(name), name, kind, default)


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


def arguments_of(text: Any, where: str) -> dict[str, Any]:
    """A tool call's arguments, which OpenAI's protocols carry as JSON in a string. What is no object there was never sent by us."""
    try:
        parsed = orjson.loads(text or "{}") if isinstance(text, str) else text
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{where}: no JSON: {error}") from error
    return object_at({} if parsed is None else parsed, where)


def positive(value: int | None, name: str) -> int | None:
    """A limit of tokens. Raises InvalidRequestError below 1."""
    if value is not None and value < 1:
        raise InvalidRequestError(f"{name}: must be at least 1, got {value}")
    return value


def sdk_retries(headers: Mapping[str, str]) -> bool:
    """Both vendors' SDKs count their tries in this header."""
    return headers.get("x-stainless-retry-count", "0") not in ("", "0")
