"""The tools of a Responses request as functions, which is the form that templates take.

A namespace groups tools of one purpose, such as those of an MCP server. The model sees each of them as a function named
`<namespace>__<name>`; its calls go to the client with both names, and come back with both. What the client says about a
namespace is system text, because templates have no place for it beside the tools.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapter.conversation import NamespacedName, Tool, ToolForms
from adapter.dialects.base import InvalidRequestError, field_of, object_at
from adapter.dialects.function_tools import function_tool, text_tool

_RUN_BY_VENDOR = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "tool_search",
    "programmatic",
)
"""Beginnings of the types of tools that the vendor's own servers run; a model that is not offered them calls none."""


@dataclass(frozen=True, slots=True)
class ResponsesTool:
    """One tool as the model sees it, and how its calls are written."""

    function: Tool
    strict: bool
    custom: bool
    qualified: NamespacedName | None = None

    @property
    def name(self) -> str:
        return str(self.function["function"]["name"])


def tools_of(tool: dict[str, Any], where: str) -> list[ResponsesTool]:
    """Return the functions that one entry of `tools` stands for: none if the vendor's own servers run it.

    Raises InvalidRequestError, also for a tool with calls of its own kind: a model that is not offered a tool which
    the agent waits for would break the agent.
    """
    kind = tool.get("type")
    if kind in ("function", "custom"):
        return [_tool(tool, where, None)]
    if kind == "namespace":
        namespace = field_of(tool, "name", str, "")
        inner = [object_at(one, f"{where}.tools") for one in field_of(tool, "tools", list, [])]
        return [_tool(one, f"{where}.tools[{at}]", namespace) for at, one in enumerate(inner)]
    if is_run_by_vendor(tool):
        return []
    if kind == "tool_search":
        raise InvalidRequestError(
            f"{where}: a tool_search that the client executes is not offered to this model; send all tools at once"
        )
    raise InvalidRequestError(
        f"{where}.type: {kind!r} is not offered to this model; declare the tool as a function or a custom tool"
    )


def is_run_by_vendor(tool: dict[str, Any]) -> bool:
    """Return whether the vendor's own servers run the tool. A tool_search names its executor in `execution`."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_RUN_BY_VENDOR) and tool.get("execution") != "client"


def namespaces_text(tools: Sequence[dict[str, Any]]) -> str:
    """Return the descriptions of the namespaces among the entries of `tools` as system text, "" if there is none."""
    described = (
        (NamespacedName(field_of(tool, "name", str, ""), "*").flat, field_of(tool, "description", str, "").strip())
        for tool in tools
        if tool.get("type") == "namespace"
    )
    return "\n".join(f"Tools {names}: {text}" for names, text in described if text)


def forms_of(tools: Sequence[ResponsesTool]) -> ToolForms:
    return ToolForms(
        frozenset(tool.name for tool in tools if tool.strict),
        frozenset(tool.name for tool in tools if tool.custom),
        {tool.name: tool.qualified for tool in tools if tool.qualified is not None},
    )


def called_name(item: dict[str, Any]) -> str:
    """The name of the function that a call in a history is of, as the model sees it."""
    name = str(field_of(item, "name", str, ""))
    namespace = field_of(item, "namespace", str, "")
    return NamespacedName(namespace, name).flat if namespace else name


def _tool(tool: dict[str, Any], where: str, namespace: str | None) -> ResponsesTool:
    custom = tool.get("type") == "custom"
    if not custom and tool.get("type") != "function":
        raise InvalidRequestError(f"{where}.type: a namespace has functions and custom tools, not {tool.get('type')!r}")
    name = tool.get("name")
    qualified = NamespacedName(namespace, name) if namespace is not None and isinstance(name, str) else None
    shown = tool if qualified is None else tool | {"name": qualified.flat}
    function = text_tool(shown, where) if custom else function_tool(shown, where)
    return ResponsesTool(function, tool.get("strict") is True, custom, qualified)
