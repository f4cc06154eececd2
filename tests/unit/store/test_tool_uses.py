"""Tool calls of several programs are recognised by their arguments and not by their names."""

from typing import Any

import pytest

from store.tool_uses import read_tool_use

BEGIN_PATCH = "*** Begin Patch\n*** Update File: a.py\n-x\n+y\n*** End Patch"
CASES = [
    ("bash", {"command": "ls -l\npwd"}, "shell", "ls -l"),
    ("exec_command", {"cmd": ["bash", "-lc", "make test"]}, "shell", "make test"),
    ("shell", {"command": ["git", "diff"]}, "shell", "git diff"),
    ("Edit", {"file_path": "a.py", "old_string": "x", "new_string": "y"}, "edit", "a.py"),
    ("str_replace_editor", {"command": "str_replace", "path": "a.py", "old_str": "x", "new_str": "y"}, "edit", "a.py"),
    ("MultiEdit", {"file_path": "a.py", "edits": [{"old_string": "x", "new_string": "y"}]}, "edit", "a.py"),
    ("str_replace_editor", {"command": "view", "path": "a.py"}, "read", "a.py"),
    ("str_replace_editor", {"command": "create", "path": "a.py", "file_text": "x"}, "write", "a.py"),
    ("Write", {"file_path": "a.py", "content": "x"}, "write", "a.py"),
    ("Read", {"file_path": "a.py", "limit": 10}, "read", "a.py"),
    ("apply_patch", {"input": BEGIN_PATCH}, "patch", "patch"),
    ("apply_patch", {"patchText": BEGIN_PATCH}, "patch", "patch"),
    ("edit", {"filePath": "a.py", "oldString": "x", "newString": "y"}, "edit", "a.py"),
    ("write", {"filePath": "a.py", "content": "x"}, "write", "a.py"),
    ("web_search", {"query": "x"}, "other", ""),
    ("nothing", {}, "other", ""),
]


@pytest.mark.parametrize(("name", "arguments", "kind", "title"), CASES)
def test_kinds(name: str, arguments: dict[str, Any], kind: str, title: str) -> None:
    use = read_tool_use({"id": "1", "function": {"name": name, "arguments": arguments}})
    assert (use.name, use.kind, use.title) == (name, kind, title)


def test_an_edit_is_a_diff() -> None:
    arguments = {"path": "a.py", "old_str": "keep\nold\n", "new_str": "keep\nnew\n"}
    body = read_tool_use({"function": {"name": "edit", "arguments": arguments}}).body
    assert body.splitlines()[2:] == ["@@ -1,2 +1,2 @@", " keep", "-old", "+new"]


def test_arguments_that_are_no_object() -> None:
    assert read_tool_use({"function": {"name": "custom", "arguments": "plain"}}).body == '{\n  "input": "plain"\n}'
    assert read_tool_use({}).kind == "other"
