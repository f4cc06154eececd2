"""Tools in the form that templates take, which is the one of OpenAI's functions."""

from typing import Any

from adapter.conversation import Tool
from adapter.dialects.base import InvalidRequestError, object_at

_TEXT_PARAMETER: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def function_tool(function: dict[str, Any], where: str) -> Tool:
    """A function. Raises InvalidRequestError."""
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}.name: a string expected")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{where}.description: a string expected, got {type(description).__name__}")
    if function.get("parameters") is not None:
        object_at(function["parameters"], f"{where}.parameters")
    kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return {"type": "function", "function": kept}


def text_tool(custom: dict[str, Any], where: str) -> Tool:
    """A custom tool, which takes plain text, as a function with one parameter. Raises InvalidRequestError."""
    shown = {"name": custom.get("name"), "description": custom.get("description"), "parameters": _TEXT_PARAMETER}
    return function_tool(shown, where)
