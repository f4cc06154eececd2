"""Heads of requests, made once: system text and tools are tens of kilobytes that stay the same for thousands of calls.

Why here: reading them includes checking every tool's schema, which takes tens of milliseconds for a real agent's tools. These are the
same in thousands of conversations whose system texts differ, so that they are remembered by themselves, too.
Called by: `reading.py`.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import orjson
import xxhash
from jsonschema import SchemaError
from jsonschema.validators import validator_for

from adapter.conversation import Preamble, Tool
from adapter.dialects.base import Dialect, Fields, InvalidRequestError

_SIZE = 512
_K = TypeVar("_K")
_V = TypeVar("_V")


class PreambleCache:
    """Shared by all sessions of a process; the oldest go first."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, bytes], Preamble] = OrderedDict()
        self._good_tools: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, dialect: Dialect, fields: Fields) -> Preamble:
        """Raises InvalidRequestError where the tools cannot be used."""
        digest = xxhash.xxh3_128()
        for name in dialect.head_fields:
            raw = fields.get(name, b"")
            digest.update(len(raw).to_bytes(8, "big"))
            digest.update(raw)
        key = (dialect.name, digest.digest())
        head = self._known.get(key)
        if head is None:
            head = self._checked(dialect, fields)
            self._remember(self._known, key, head)
        return head

    def _checked(self, dialect: Dialect, fields: Fields) -> Preamble:
        try:
            system, tools = dialect.head(fields)
            digest = xxhash.xxh3_128_digest(orjson.dumps(tools))
            if digest not in self._good_tools:
                check_tools(tools)
                self._remember(self._good_tools, digest, None)
            return Preamble.of(system, tools)
        except orjson.JSONDecodeError as error:
            raise InvalidRequestError(f"the body is no JSON: {error}") from error
        except (RecursionError, TypeError) as error:
            raise InvalidRequestError(f"tools: nested too deeply ({error})") from error

    def _remember(self, known: OrderedDict[_K, _V], key: _K, value: _V) -> None:
        with self._lock:
            known[key] = value
            while len(known) > _SIZE:
                known.popitem(last=False)


def check_tools(tools: Sequence[Tool]) -> None:
    """Names are there once, and parameters are a JSON schema of an object."""
    seen: set[str] = set()
    for tool in tools:
        name, schema = tool["function"]["name"], tool["function"].get("parameters", {})
        if not name or name in seen:
            raise InvalidRequestError(
                f"tools: {'the name ' + repr(name) + ' is there twice' if name else 'a tool without a name'}"
            )
        seen.add(name)
        if schema.get("type", "object") != "object":
            raise InvalidRequestError(
                f"tools: the parameters of {name!r} must have type 'object', not {schema['type']!r}"
            )
        try:
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            raise InvalidRequestError(
                f"tools: the parameters of {name!r} are no JSON schema: {error.message}"
            ) from error
