"""The value of an argument that a model writes as plain text, by its tool's schema, and JSON that loses no digit.

A value is read as a type only if the text is how that type is spelled; otherwise it stays the text.
"""

import json
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"null": None, "none": None, "true": True, "false": False}
_TYPE_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_OTHER_NAMES = {"double": "number"} | {kind.__name__: name for kind, name in _TYPE_NAMES.items()}


def type_name(value: Any) -> str:
    """The JSON schema's name of a value's type."""
    return _TYPE_NAMES.get(type(value), "null")


def types_of(schema: Any, root: Mapping[str, Any], open_references: Collection[str] = ()) -> frozenset[str]:
    """The types that a schema allows, with its references to `root` resolved; empty if it names none."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type", ())
    named = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    found = {_OTHER_NAMES.get(one, one) for one in named if isinstance(one, str)}
    values = schema.get("enum")
    found.update(map(type_name, values if isinstance(values, list) else ()))
    if "const" in schema:
        found.add(type_name(schema["const"]))
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for one in choices if isinstance(choices, list) else ():
            found |= types_of(one, root, open_references)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in open_references:
        found |= types_of(_resolved(reference, root), root, {*open_references, reference})
    return frozenset(found)


def _resolved(reference: str, root: Any) -> Any:
    """The part of the schema that a JSON pointer names; None if it has none, or if it is another document's."""
    if not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
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
