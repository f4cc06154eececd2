"""Answers whose format the client prescribes: checked after sampling, so that the recorded logprobs keep their meaning.

The result says if an answer violates the format (`violation`); no sampled token is changed.
"""

from typing import Any

import orjson
from jsonschema import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry

from adapter.dialects.base import InvalidRequestError, field_of

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def schema_of(format: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the JSON schema that an answer must match, None for plain text.

    Takes all vendors' forms: `json_object`, and `json_schema` with the schema inside or inside of `json_schema`. Raises
    InvalidRequestError for other types, and for a schema that is none.
    """
    kind = format.get("type") or "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise InvalidRequestError(f"{name}.type: {str(kind)[:100]!r} is none of text, json_object, json_schema")
    outer = field_of(format, "json_schema", dict, format)
    schema: dict[str, Any] = field_of(outer, "schema", dict, {})
    try:
        validator_for(schema).check_schema(schema)
    except (SchemaError, RecursionError) as error:
        raise InvalidRequestError(f"{name}.schema: not a JSON schema: {str(error)[:200]}") from error
    return schema


def violation_of(text: str, schema: dict[str, Any]) -> str | None:
    """Return a sentence if an answer does not match the schema, None if it does."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return f"the answer is not the JSON that was asked for: {error}"
    return None if matches_schema(value, schema) else "the answer does not match the JSON schema that was asked for"


def matches_schema(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value matches a schema that a client sent.

    False if the schema refers to anything outside of itself: schemas come from the sandbox, and no URL in them is
    fetched. False also if the schema cannot be applied to the value: this runs after sampling, and must not raise.
    """
    try:
        return bool(validator_for(schema)(schema, registry=Registry()).is_valid(value))
    except Exception:  # of the validator, its references, its patterns
        return False
