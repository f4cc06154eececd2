"""The tested features of each agent program: parameters of the end-to-end tests, and the table of
`docs/reference/agents.md`."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from activities.harnesses.claude_code import DEFAULT_EXTRA_ARGS

PLACEHOLDER = "[image, 31x7, omitted]"


@dataclass(frozen=True)
class ViewImage:
    """A tool that reads an image, and what the model sees of it."""

    tool: str
    argument: str
    seen: str = PLACEHOLDER


@dataclass(frozen=True)
class SubAgent:
    """The call that starts a sub-agent. `lane`: whether the program's requests say which sub-agent makes them.
    `in_background`: whether the main conversation goes on meanwhile, and may end before the sub-agent's first request.
    """

    tool: str
    arguments: Mapping[str, Any]
    lane: bool = True
    in_background: bool = False


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
    "codex": SubAgent("multi_agent_v1__spawn_agent", {"message": "Find where it breaks."}, in_background=True),
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
class Return:
    """`thinking`: the field in which the program sends thinking back. `resume`: its arguments for going on with the
    last conversation of a directory. `resumed_as`: the fork cause of the first turn then; None: it goes on.
    """

    thinking: str
    resume: str
    resumed_as: str | None = None


RETURN: dict[str, Return] = {
    "claude_code": Return("thinking", f"{DEFAULT_EXTRA_ARGS} --continue"),
    "codex": Return("encrypted_content", "resume --last"),
    "opencode": Return("reasoning_content", "--continue"),
    # Its first message lists the files of the directory, and does so anew.
    "qwen_code": Return("reasoning_content", "--continue", resumed_as="edit"),
}


@dataclass(frozen=True)
class Compaction:
    """A conversation that a program compacts: the size of the context, and the words of two results of tools.

    `tag`: around the summary that it takes. `asked_as`: the fork cause of the request for it; None: it continues the
    conversation's stream.
    """

    context_tokens: int
    num_words: tuple[int, int]
    tag: str = "summary"
    asked_as: str | None = "compaction"


COMPACTION: dict[str, Compaction] = {
    "claude_code": Compaction(90_000, (1100, 1100)),
    "codex": Compaction(29_000, (800, 1)),
    "opencode": Compaction(49_000, (2500, 1)),
    "qwen_code": Compaction(86_000, (1100, 1100), "state_snapshot", asked_as=None),
}


@dataclass(frozen=True)
class TestedAgent:
    """A row of the table; `thinking` is of programs whose other features are not tested."""

    title: str
    protocol: str
    tools: str
    thinking: str = ""

    __test__ = False


AGENTS = {
    "claude_code": TestedAgent("Claude Code", "Messages", "functions"),
    "codex": TestedAgent("Codex", "Responses", "functions, custom tools, namespaces"),
    "opencode": TestedAgent("OpenCode", "Chat", "functions"),
    "qwen_code": TestedAgent("Qwen Code", "Chat", "functions"),
    "mini_swe_agent": TestedAgent("mini-swe-agent", "Chat", "one function", "not checked"),
    "bash_agent": TestedAgent("`bash_agent`", "Chat", "one function", "`reasoning_content`"),
}
"""Every agent of `activities/harnesses/registry.py`."""


@dataclass(frozen=True)
class OtherAgent(TestedAgent):
    """A program that no harness starts. `packages`: with their versions, of npm or PyPI. `shell`: its shell tool."""

    packages: tuple[str, ...] = ()
    shell: str = "bash"


OTHER_AGENTS = {
    "continue": OtherAgent(
        "Continue", "Chat", "functions", "nothing; one chain", ("@continuedev/cli@1.5.47",), shell="Bash"
    ),
    "grok_cli": OtherAgent("grok-cli", "Chat", "functions", "nothing; one chain", ("@vibe-kit/grok-cli@0.0.34",)),
    "llama_index": OtherAgent(
        "llama-index",
        "Chat",
        "functions",
        "nothing; one chain",
        ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
    ),
}


def agents_table(versions: Mapping[str, str]) -> str:
    """Return the rows of the table in `docs/reference/agents.md`, by agent in the order of AGENTS."""
    lines = [
        "| agent | protocol | sends thinking back as | tools | sub-agents | MCP | images | compaction | resumed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, agent in AGENTS.items():
        title = f"{agent.title} {versions[name]}" if name in versions else agent.title
        thinking = f"`{RETURN[name].thinking}`" if name in RETURN else agent.thinking
        lines.append(f"| {' | '.join([title, agent.protocol, thinking, agent.tools, *_features(name)])} |")
    for other in OTHER_AGENTS.values():
        version = re.split("[@=]", other.packages[0])[-1]
        row = [f"{other.title} {version}", other.protocol, other.thinking, other.tools, *["not tested"] * 5]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _features(name: str) -> list[str]:
    subs, mcp, image, compaction, back = (one.get(name) for one in (SUB_AGENTS, MCP, IMAGES, COMPACTION, RETURN))
    own_lane = subs is not None and subs.lane
    lane = "in a lane of its own" if own_lane else "as a new conversation, because its requests do not name it"
    own_text = image is not None and image.seen != PLACEHOLDER
    seen = "the program's own text" if own_text else "the adapter's placeholder"
    asks = "in the same stream" if compaction is not None and compaction.asked_as is None else "in one of its own"
    chain = (
        "a new stream, because it lists its directory anew" if back is not None and back.resumed_as else "one stream"
    )
    return [
        "no" if subs is None else f"`{subs.tool}`, each {lane}",
        "no" if mcp is None else f"`{mcp.tool}`",
        "no" if image is None else f"`{image.tool}`: {seen}",
        "no" if compaction is None else f"yes; it asks for the summary {asks}",
        "no" if back is None else chain,
    ]
