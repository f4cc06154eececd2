"""Parsed preambles: system text and tools, tens of kilobytes that are the same for thousands of calls.

Parsing them includes checking each tool's schema, which takes tens of milliseconds for a real agent's tools.
Conversations with different system texts often have the same tools, so checked tools are remembered separately, too.
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

_MAX_ENTRIES = 512
_K = TypeVar("_K")
_V = TypeVar("_V")


class PreambleCache:
    """Shared by all sessions of a process; the oldest entries are evicted. Thread-safe."""

    def __init__(self) -> None:
        self._preambles: OrderedDict[tuple[str, bytes], Preamble] = OrderedDict()
        self._valid_tools: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, dialect: Dialect, fields: Fields) -> Preamble:
        """Return the preamble of a request's fields. Raises InvalidRequestError if its tools cannot be used."""
        digest = xxhash.xxh3_128()
        for name in dialect.preamble_fields:
            raw = fields.get(name, b"")
            digest.update(len(raw).to_bytes(8, "big"))
            digest.update(raw)
        key = (dialect.name, digest.digest())
        preamble = self._preambles.get(key)
        if preamble is None:
            preamble = self._parse(dialect, fields)
            self._remember(self._preambles, key, preamble)
        return preamble

    def _parse(self, dialect: Dialect, fields: Fields) -> Preamble:
        try:
            content = dialect.preamble(fields)
            digest = xxhash.xxh3_128_digest(orjson.dumps(content.tools))
            if digest not in self._valid_tools:
                check_tools(content.tools)
                self._remember(self._valid_tools, digest, None)
            return Preamble.of(content.system, content.tools, content.forms)
        except orjson.JSONDecodeError as error:
            raise InvalidRequestError(f"the body is no JSON: {error}") from error
        except (RecursionError, TypeError) as error:
            raise InvalidRequestError(f"tools: nested too deeply ({error})") from error

    def _remember(self, cache: OrderedDict[_K, _V], key: _K, value: _V) -> None:
        with self._lock:
            cache[key] = value
            while len(cache) > _MAX_ENTRIES:
                cache.popitem(last=False)


def check_tools(tools: Sequence[Tool]) -> None:
    """Check that names are unique and parameters are JSON schemas of objects. Raises InvalidRequestError."""
    seen: set[str] = set()
    for tool in tools:
        name = tool["function"]["name"]
        schema = tool["function"].get("parameters", {})
        if not name:
            raise InvalidRequestError("tools: a tool has no name")
        if name in seen:
            raise InvalidRequestError(f"tools: the name {name!r} is used twice")
        seen.add(name)
        if schema.get("type", "object") != "object":
            raise InvalidRequestError(
                f"tools: the parameters of {name!r} must have type 'object', not {schema['type']!r}"
            )
        try:
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            raise InvalidRequestError(
                f"tools: the parameters of {name!r} are not a JSON schema: {error.message}"
            ) from error
