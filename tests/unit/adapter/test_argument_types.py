"""Texts that models write for arguments, and the values that clients get."""

from typing import Any

import pytest

from adapter.argument_types import argument_types, exact_json, read_value, required_arguments, types_of

ROOT: dict[str, Any] = {
    "$defs": {
        "Edits": {"type": "array", "items": {"type": "object"}},
        "Limit": {"allOf": [{"$ref": "#/$defs/Whole"}]},
        "Whole": {"type": "integer"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
        "a/b": {"enum": ["x", None]},
        "A[int]": {"type": "integer"},
    },
    "definitions": {"Old": {"type": "bool"}},
    "anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}],
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"$ref": "#/$defs/Edits"}, {"array"}),
        ({"$ref": "#/$defs/Limit", "description": "d"}, {"integer"}),
        ({"$ref": "#/$defs/Tree"}, {"null"}),
        ({"$ref": "#/$defs/a~1b"}, {"string", "null"}),
        ({"$ref": "#/definitions/Old"}, {"boolean"}),
        ({"$ref": "#/$defs/Missing"}, set()),
        ({"$ref": "https://example.invalid/x.json"}, set()),
        ({"anyOf": [{"type": "integer"}, {"type": ["string", "null"]}]}, {"integer", "string", "null"}),
        ({"const": 3}, {"integer"}),
        ({"$ref": "#/anyOf/1/items"}, {"number"}),
        ({"$ref": "#/anyOf/7"}, set()),
        ({"$ref": "#/$defs/A%5Bint%5D"}, {"integer"}),
        (True, set()),
        ({"type": {"no": 1}, "enum": 5, "anyOf": "x"}, set()),
    ],
)
def test_types_follow_references(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


WHOLE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TEXT = {"properties": {"n": {"type": "string"}, "s": {"type": "string"}}, "required": ["s"]}


@pytest.mark.parametrize(
    ("schema", "types", "required"),
    [
        (WHOLE, {"n": {"integer"}}, ["n"]),
        ({"$ref": "#/$defs/Whole", "$defs": {"Whole": WHOLE}}, {"n": {"integer"}}, ["n"]),
        ({"allOf": [WHOLE, TEXT]}, {"n": {"integer", "string"}, "s": {"string"}}, ["n", "s"]),
        ({"oneOf": [WHOLE, TEXT], "required": ["n"]}, {"n": {"integer", "string"}, "s": {"string"}}, ["n"]),
        ({"properties": [], "required": "n", "allOf": {"n": 1}}, {}, []),
        ({"$ref": "#"}, {}, []),
        (None, {}, []),
    ],
)
def test_arguments_that_a_tools_schema_has_by_reference_and_in_parts(
    schema: Any, types: dict[str, set[str]], required: list[str]
) -> None:
    assert (argument_types(schema), required_arguments(schema)) == (types, required)


def test_schemas_that_refer_to_each_other_take_linear_time() -> None:
    choices = [{"$ref": f"#/$defs/{number}"} for number in range(60)]
    schema = {"$defs": {str(number): {"anyOf": choices, "type": "null"} for number in range(60)}}
    assert types_of({"$ref": "#/$defs/0"}, schema) == {"null"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("0071", "string integer", "0071"),
        ("0071", "integer", "0071"),
        ("71", "string integer", 71),
        ("1", "string", "1"),
        ("1", "boolean string", "1"),
        ("true", "boolean string", True),
        ("False", "boolean", False),
        ("TRUE", "boolean string", "TRUE"),
        ("true", "string", "true"),
        ("None", "integer null", None),
        ("NULL", "integer null", None),
        ("NULL", "string null", "NULL"),
        ("null", "string null", None),
        ("None", "string", "None"),
        ("+5", "integer", "+5"),
        ("-0", "integer", "-0"),
        ("1_000", "integer", "1_000"),
        (" 5\n", "integer", 5),
        ("9007199254740993", "integer", 9007199254740993),
        ("18446744073709551616", "integer", "18446744073709551616"),
        ("0.1", "number", 0.1),
        ("1e3", "number", 1000.0),
        ("7", "number", 7),
        ("0.12345678901234567890", "number", "0.12345678901234567890"),
        ("1e999", "number", "1e999"),
        ("5.5", "integer", "5.5"),
        ('[{"a": 1}]', "array", [{"a": 1}]),
        ('{"a": 1, "a": 2}', "object", '{"a": 1, "a": 2}'),
        ('{"a": 123456789012345678901}', "object", '{"a": 123456789012345678901}'),
        ("{'a': 1}", "object", "{'a': 1}"),
        ("[1]", "object string", "[1]"),
        ("[" * 100_000, "array", "[" * 100_000),
        ("  x ", "string null", "  x "),
        ("5", "", "5"),
    ],
)
def test_a_value_is_what_was_written(text: str, types: str, value: Any) -> None:
    found = read_value(text, types.split())
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1" * 5000, '{"a": {"b": 1, "b": 1}}'])
def test_json_that_cannot_be_kept_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        exact_json(text)
