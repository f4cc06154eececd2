"""Which features of which agent programs are tested: parameters of the end-to-end tests, and the table of
`docs/agents.md`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLACEHOLDER = "[image, 31x7, omitted]"
_TOLD = "it is given the size of the context; not checked"


@dataclass(frozen=True)
class ViewImage:
    """A tool that reads an image, and what the model sees of it."""

    tool: str
    argument: str
    seen: str = PLACEHOLDER


@dataclass(frozen=True)
class SubAgent:
    """The call that starts a sub-agent. `lane`: whether the program's requests say which sub-agent makes them."""

    tool: str
    arguments: Mapping[str, Any]
    lane: bool = True


@dataclass(frozen=True)
class Mcp:
    """A call of the tool `add` of an MCP server `calc`, and how the program is told of the server."""

    tool: str
    configure: Callable[[Path], dict[str, Any]]
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"a": 40, "b": 2})


def _json_servers(server: Path) -> dict[str, Any]:
    servers = json.dumps({"mcpServers": {"calc": {"command": "python3", "args": [str(server)]}}})
    return {"extra_args": f"--mcp-config '{servers}'"}


def _codex_servers(server: Path) -> dict[str, Any]:
    return {"extra_args": f"-c mcp_servers.calc.command=python3 -c 'mcp_servers.calc.args=[\"{server}\"]'"}


def _opencode_servers(server: Path) -> dict[str, Any]:
    servers = {"mcp": {"calc": {"type": "local", "command": ["python3", str(server)]}}}
    return {"extra_env": {"OPENCODE_CONFIG_CONTENT": json.dumps(servers)}}


_LOOK = {"description": "look", "prompt": "Find where it breaks."}
IMAGES: dict[str, ViewImage] = {
    "claude_code": ViewImage("Read", "file_path"),
    "codex": ViewImage("view_image", "path"),
    # These two put a text of their own in its place, because they are not told that the model sees images.
    "opencode": ViewImage("read", "filePath", "does not support image input"),
    "qwen_code": ViewImage("read_file", "file_path", "cannot process this type of file"),
}
SUB_AGENTS: dict[str, SubAgent] = {
    "claude_code": SubAgent("Agent", {**_LOOK, "subagent_type": "investigator", "run_in_background": False}),
    "codex": SubAgent("multi_agent_v1__spawn_agent", {"message": "Find where it breaks."}),
    "opencode": SubAgent("task", {**_LOOK, "subagent_type": "general"}),
    "qwen_code": SubAgent(
        "agent", {**_LOOK, "subagent_type": "general-purpose", "run_in_background": False}, lane=False
    ),
}
MCP: dict[str, Mcp] = {
    "claude_code": Mcp("mcp__calc__add", _json_servers),
    "codex": Mcp("mcp__calc__add", _codex_servers),
    "opencode": Mcp("calc_add", _opencode_servers),
    # It offers the tools of servers only through a tool of its own.
    "qwen_code": Mcp("tool_call", _json_servers, {"name": "mcp__calc__add", "arguments": {"a": 40, "b": 2}}),
}


@dataclass(frozen=True)
class TestedAgent:
    """A row of the table. `compaction`: what happens before the context is full."""

    title: str
    protocol: str
    sends_reasoning: str
    tools: str
    compaction: str

    __test__ = False


AGENTS = {
    "claude_code": TestedAgent("Claude Code", "Messages", "yes, as thinking blocks", "functions", "yes"),
    "codex": TestedAgent(
        "Codex", "Responses", "yes, as encrypted content", "functions, custom tools, namespaces", "yes"
    ),
    "opencode": TestedAgent("OpenCode", "Chat", "not checked", "functions", _TOLD),
    "qwen_code": TestedAgent("Qwen Code", "Chat", "not checked", "functions", _TOLD),
    "mini_swe_agent": TestedAgent("mini-swe-agent", "Chat", "not checked", "one function", "no"),
    "bash_agent": TestedAgent("`bash_agent`", "Chat", "yes, as `reasoning_content`", "one function", "no"),
}
"""Every agent of `activities/harnesses/registry.py`."""


def agents_table(versions: Mapping[str, str]) -> str:
    """Return the rows of the table in `docs/agents.md`, by agent in the order of AGENTS."""
    lines = [
        "| agent | protocol | sends reasoning back | tools | sub-agents | MCP | images | compaction |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, agent in AGENTS.items():
        title = f"{agent.title} {versions[name]}" if name in versions else agent.title
        cells = [title, agent.protocol, agent.sends_reasoning, agent.tools, *_features(name), agent.compaction]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _features(name: str) -> list[str]:
    subs, mcp, image = SUB_AGENTS.get(name), MCP.get(name), IMAGES.get(name)
    where = (
        "in a lane of its own"
        if subs is not None and subs.lane
        else "as a new conversation, because its requests do not name it"
    )
    return [
        "no" if subs is None else f"`{subs.tool}`, each {where}",
        "no" if mcp is None else f"`{mcp.tool}`",
        "no"
        if image is None
        else f"`{image.tool}`: the adapter's placeholder"
        if image.seen == PLACEHOLDER
        else f"`{image.tool}`: the program's own text",
    ]
