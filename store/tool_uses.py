"""Read from a tool call's arguments what it does: pages show it accordingly, and a group may begin before an edit.

Programs name the same tools differently, but their arguments tell them apart: a command, a text that is replaced, a
file that is written or read, a patch.
"""

from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

import orjson

_COMMANDS = ("command", "cmd", "script")
_PATHS = ("file_path", "filePath", "path", "filename", "notebook_path", "target_file")
_OLD = ("old_string", "oldString", "old_str", "old_text", "search")
_NEW = ("new_string", "newString", "new_str", "new_text", "replace", "insert_text")
_CONTENTS = ("content", "file_text", "contents", "new_source")
_PATCHES = ("patch", "patchText", "input", "diff")
_PATCH_STARTS = ("*** Begin Patch", "diff --git", "--- ")


@dataclass(slots=True, frozen=True)
class ToolUse:
    """One tool call. `kind`: shell, edit, write, read, patch or other. `title`: the command's first line or the path.

    `body`: what the kind shows: the command, a unified diff, the written text or the arguments as JSON.
    """

    call_id: str
    name: str
    kind: str
    title: str
    body: str


def object_of(value: Any) -> dict[str, Any]:
    """Return a JSON object; {} for anything else, as in a damaged turn or in output that the policy can write to."""
    return value if isinstance(value, dict) else {}


def read_tool_uses(message: dict[str, Any]) -> list[ToolUse]:
    calls = message.get("tool_calls")
    return [read_tool_use(object_of(one)) for one in calls] if isinstance(calls, list) else []


def read_tool_use(call: dict[str, Any]) -> ToolUse:
    """Read a tool call in the form in which the adapter stores it."""
    function = object_of(call.get("function"))
    name = str(function.get("name") or "")
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        arguments = {"input": arguments} if isinstance(arguments, str) else {}
    kind, title, body = _classify(arguments)
    return ToolUse(str(call.get("id") or ""), name, kind, title, body)


def _classify(arguments: dict[str, Any]) -> tuple[str, str, str]:
    path = _text(arguments, _PATHS)
    old, new = _text(arguments, _OLD), _text(arguments, _NEW)
    if new is not None and (old is not None or "insert_line" in arguments):
        return "edit", path or "", diff_of(old or "", new, path or "file")
    if isinstance(arguments.get("edits"), list):
        edits = [one for one in arguments["edits"] if isinstance(one, dict)]
        parts = [diff_of(_text(one, _OLD) or "", _text(one, _NEW) or "", path or "file") for one in edits]
        return "edit", path or "", "\n".join(parts)
    for name in _PATCHES:
        value = arguments.get(name)
        if isinstance(value, str) and value.lstrip().startswith(_PATCH_STARTS):
            return "patch", path or "patch", value
    command = _command(arguments)
    if command is not None and path is None:
        return "shell", command.strip().split("\n", 1)[0], command
    content = _text(arguments, _CONTENTS)
    if path is not None and content is not None:
        return "write", path, content
    if path is not None:
        others = {key: value for key, value in arguments.items() if key not in _PATHS}
        return "read", path, _json(others) if others else ""
    return "other", "", _json(arguments)


def _command(arguments: dict[str, Any]) -> str | None:
    for name in _COMMANDS:
        value = arguments.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return value[-1] if value[:2] in (["bash", "-lc"], ["bash", "-c"], ["sh", "-c"]) else " ".join(value)
    return None


def _text(arguments: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((arguments[name] for name in names if isinstance(arguments.get(name), str)), None)


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()


def diff_of(old: str, new: str, path: str) -> str:
    lines = unified_diff(old.splitlines(), new.splitlines(), path, path, lineterm="", n=3)
    return "\n".join(lines)
