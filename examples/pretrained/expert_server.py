"""A scripted expert that answers as an endpoint: Chat Completions with the tool `bash`, for the tasks of a dataset.

It knows the fix from the row's gold patch, and works like a careful person: it reads the files, replaces the wrong
line, runs the repository's check if there is one, and says that it is done. At a given rate it replaces nothing.

    python -m examples.pretrained.expert_server --port 8900 datasets/curriculum/train_warm.jsonl
"""

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
import uvicorn
from fastapi import FastAPI

from examples.tiny_policy.conversation import DONE, edit_command
from examples.tiny_policy.simulated_shell import ALL_SOURCES, CHECK, CHECK_FILE

_EDIT = re.compile(r"^\+\+\+ b/(\S+)$.*?^-(?!--)(.*?)$\n^\+(.*?)$", re.MULTILINE | re.DOTALL)


class Fix(NamedTuple):
    """The line that a task's gold patch replaces, without indentation. `has_check`: the repository has a check."""

    file: str
    wrong: str
    right: str
    has_check: bool


def read_fixes(paths: Iterable[Path]) -> dict[str, Fix]:
    """Return issue → fix of each row. Raises ValueError if a row's gold patch replaces no line."""
    fixes = {}
    for path in paths:
        for line in path.read_text().splitlines():
            metadata = json.loads(line)["metadata"]
            _, file, wrong, right, _ = _EDIT.split(metadata["gold_patch"], 1)
            has_check = f"chmod +x {CHECK_FILE}" in "".join(metadata["pre_commands"])
            fixes[metadata["problem_statement"]] = Fix(file, wrong.strip(), right.strip(), has_check)
    return fixes


def next_message(messages: Sequence[dict[str, Any]], fixes: Mapping[str, Fix], errs: bool) -> dict[str, Any]:
    """Return the expert's next message of a conversation; OK to one that is about no known task."""
    issue = next((message["content"] for message in messages if message["role"] == "user"), "")
    fix = fixes.get(issue.strip())
    num_answers = sum(message["role"] == "assistant" for message in messages)
    if fix is None or num_answers > 1:
        return {"role": "assistant", "content": DONE if fix else "OK"}
    if num_answers == 0:
        return _call("I read the code first.", f"head -n 50 {ALL_SOURCES}")  # which shows the files' names
    command = edit_command(fix.file, fix.wrong, fix.wrong if errs else fix.right)
    return _call(
        f"In {fix.file}, `{fix.wrong}` must be `{fix.right}`.", command + (f" && {CHECK}" if fix.has_check else "")
    )


def _call(text: str, command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": text, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def make_app(fixes: Mapping[str, Fix], error_rate: float = 0.0) -> FastAPI:
    """Return the server. It draws its errors in the order of the requests."""
    app, rng = FastAPI(), random.Random(0)

    @app.post("/v1/chat/completions")
    async def complete(request: dict[str, Any]) -> dict[str, Any]:
        message = next_message(request["messages"], fixes, rng.random() < error_rate)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        return {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}

    return app


def serve(datasets: list[Path], port: int = 8900, error_rate: float = 0.0) -> None:
    """Serve the expert on the loopback address. `error_rate`: the share of edits that change nothing."""
    uvicorn.run(make_app(read_fixes(datasets), error_rate), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(serve)
