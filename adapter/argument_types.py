"""The value of an argument that a model writes as plain text, by its tool's schema, and JSON that loses no digit.

A value is read as a type only if the text is how that type is spelled; otherwise it stays the text.
"""

import json
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"null": None, "none": None, "true": True, "false": False}
_TYPE_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_OTHER_NAMES = {"double": "number"} | {kind.__name__: name for kind, name in _TYPE_NAMES.items()}


def type_name(value: Any) -> str:
    """The JSON schema's name of a value's type."""
    return _TYPE_NAMES.get(type(value), "null")


def schemas_of(schema: Any, root: Any, choices: bool = True, seen: set[str] | None = None) -> Iterator[dict[str, Any]]:
    """A schema and those that apply beside it, with references to `root` resolved. `choices`: its alternatives, too."""
    if not isinstance(schema, dict):
        return
    yield schema
    seen = set() if seen is None else seen
    for key in ("allOf", "anyOf", "oneOf") if choices else ("allOf",):
        for one in _listed(schema.get(key)):
            yield from schemas_of(one, root, choices, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from schemas_of(_resolved(reference, root), root, choices, seen)


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """The types that a schema allows; empty if it names none."""
    found: set[str] = set()
    for one in schemas_of(schema, root):
        named = one.get("type")
        names = [named] if isinstance(named, str) else [name for name in _listed(named) if isinstance(name, str)]
        found.update(_OTHER_NAMES.get(name, name) for name in names)
        found.update(map(type_name, [*_listed(one.get("enum")), *([one["const"]] if "const" in one else [])]))
    return frozenset(found)


def argument_types(schema: Any) -> dict[str, frozenset[str]]:
    """The types of each argument that a tool's schema names."""
    named = [one["properties"] for one in schemas_of(schema, schema) if isinstance(one.get("properties"), dict)]
    found: dict[str, frozenset[str]] = {}
    for name, value in ((name, value) for properties in named for name, value in properties.items()):
        found[name] = found.get(name, frozenset()) | types_of(value, schema)
    return found


def required_arguments(schema: Any) -> list[Any]:
    """The arguments that each call of a tool must have."""
    return [name for one in schemas_of(schema, schema, choices=False) for name in _listed(one.get("required"))]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolved(reference: str, root: Any) -> Any:
    """The part of the schema that a JSON pointer names; None if it has none, or if it is another document's."""
    if not reference.startswith("#"):
        return None
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        members = {str(at): one for at, one in enumerate(root)} if isinstance(root, list) else root
        root = members.get(name) if isinstance(members, dict) else None
    return root


def read_value(text: str, types: Collection[str]) -> Any:
    """The value of a text by the types that its schema allows; the text itself if it is none of theirs.

    Words may begin with a capital letter, as Python's do, and have any case if no string is allowed.
    """
    word = text.strip()
    spelled = word.lower() if "string" not in types or word in ("None", "True", "False") else word
    if spelled in _WORDS and type_name(_WORDS[spelled]) in types:
        return _WORDS[spelled]
    wanted = "number" if _NUMBER.fullmatch(word) else {"{": "object", "[": "array"}.get(word[:1], "")
    is_whole = _INTEGER.fullmatch(word) is not None
    if wanted not in types and not (is_whole and "integer" in types):
        return text
    try:
        return exact_json(word)
    except (ValueError, RecursionError):
        return text


def exact_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if a number or a member cannot be kept as it is written."""
    return _EXACT.decode(text)


def _exact_integer(text: str) -> int:
    number = int(text)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{text[:50]} has more than 64 bits")
    return number


def _exact_float(text: str) -> float:
    number = float(text)
    if Decimal(repr(number)) != Decimal(text):
        raise ValueError(f"{text[:50]} has more digits than a double")
    return number


def _refused(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def different_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these members. Raises ValueError if it has one twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a member is there twice")
    return members


_EXACT = json.JSONDecoder(
    parse_int=_exact_integer, parse_float=_exact_float, parse_constant=_refused, object_pairs_hook=different_members
)
