"""`tool_choice` of every protocol, as the one form that all share (`ToolChoice`).

A choice acts on the answer only. All tools stay in the prompt, so the next turn continues the stored stream, also with
another choice. No logit changes, so a call cannot be forced. A call of a tool that is not chosen is treated like a call
of a tool that was not offered.
"""

from collections.abc import Callable
from typing import Any

from adapter.conversation import Preamble, ToolChoice
from adapter.dialects.base import InvalidRequestError, field_of, object_at
from adapter.dialects.responses_tools import called_name, is_run_by_vendor

_MODES = {"auto": ToolChoice(), "none": ToolChoice(frozenset()), "required": ToolChoice(required=True)}
_Names = frozenset[str]
_NamesOf = Callable[[dict[str, Any], str, Preamble], _Names]


def chat_choice(choice: str | dict[str, Any], preamble: Preamble) -> ToolChoice:
    """Return the choice of a Chat request. Raises InvalidRequestError, also for a tool that is not offered."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = object_at(choice.get("allowed_tools"), "tool_choice.allowed_tools")
        return _allowed(allowed, "tool_choice.allowed_tools", preamble, _chat_names)._replace(sent=choice)
    return _openai_choice(choice, preamble, _chat_names)


def responses_choice(choice: str | dict[str, Any], preamble: Preamble) -> ToolChoice:
    """Return the choice of a Responses request. Raises InvalidRequestError, also for a tool that is not offered."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice, "tool_choice", preamble, _responses_names)._replace(sent=choice)
    return _openai_choice(choice, preamble, _responses_names)


def messages_choice(choice: dict[str, Any], preamble: Preamble) -> ToolChoice:
    """Return the choice of a Messages request. Raises InvalidRequestError, also for a tool that is not offered."""
    kind = choice.get("type") or "auto"
    if kind == "tool":
        name = str(field_of(choice, "name", str, ""))
        return ToolChoice(_offered(name, "tool_choice.name", preamble), required=True, sent=choice)
    if kind not in ("auto", "any", "none"):
        raise InvalidRequestError(f"tool_choice.type: {str(kind)[:100]!r} is none of auto, any, none, tool")
    return _MODES["required" if kind == "any" else kind]._replace(sent=choice)


def _openai_choice(choice: str | dict[str, Any], preamble: Preamble, names_of: _NamesOf) -> ToolChoice:
    if isinstance(choice, dict):
        names = names_of(choice, "tool_choice", preamble)
        if not names:
            raise InvalidRequestError(f"tool_choice.type: {choice.get('type')!r} is not offered to this model")
        return ToolChoice(names, required=True, sent=choice)
    if choice not in _MODES:
        raise InvalidRequestError(f"tool_choice: {choice[:100]!r} is none of auto, none, required")
    return _MODES[choice]._replace(sent=choice)


def _allowed(allowed: dict[str, Any], where: str, preamble: Preamble, names_of: _NamesOf) -> ToolChoice:
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequestError(f"{where}.mode: {str(mode)[:100]!r} is none of auto, required")
    names: _Names = frozenset()
    for at, tool in enumerate(field_of(allowed, "tools", list, [])):
        names |= names_of(object_at(tool, f"{where}.tools[{at}]"), f"{where}.tools[{at}]", preamble)
    if mode == "required" and not names:
        raise InvalidRequestError(f"{where}.tools: a call is required, but no tool of the list is offered")
    return ToolChoice(names, required=mode == "required")


def _chat_names(tool: dict[str, Any], where: str, preamble: Preamble) -> _Names:
    kind = tool.get("type") or "function"
    if kind not in ("function", "custom"):
        raise InvalidRequestError(f"{where}.type: {str(kind)[:100]!r} is none of function, custom, allowed_tools")
    named = object_at(tool.get(kind), f"{where}.{kind}")
    return _offered(str(field_of(named, "name", str, "")), f"{where}.{kind}.name", preamble, kind)


def _responses_names(tool: dict[str, Any], where: str, preamble: Preamble) -> _Names:
    """The names of the functions that an entry stands for: none for a tool that the vendor's own servers run."""
    kind = tool.get("type")
    if kind in ("function", "custom"):
        return _offered(called_name(tool), f"{where}.name", preamble, kind)
    if kind == "namespace":
        namespace = field_of(tool, "name", str, "")
        names = frozenset(flat for flat, one in preamble.forms.namespaces.items() if one.namespace == namespace)
        if not names:
            raise InvalidRequestError(f"{where}.name: no namespace {namespace[:100]!r} is offered")
        return names
    if is_run_by_vendor(tool):
        return frozenset()
    raise InvalidRequestError(f"{where}.type: {str(kind)[:100]!r} is not offered to this model")


def _offered(name: str, where: str, preamble: Preamble, kind: str | None = None) -> _Names:
    """The name, if a tool of this kind has it. `kind`: function or custom; None: any."""
    found = any(tool["function"]["name"] == name for tool in preamble.tools)
    if not found or (kind is not None and (kind == "custom") != (name in preamble.forms.custom)):
        raise InvalidRequestError(f"{where}: no {kind or 'tool'} {name[:100]!r} is offered; send it in tools")
    return frozenset({name})
