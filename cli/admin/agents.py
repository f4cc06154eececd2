"""`ratchet admin agents`: fetch and list the agent programs that sandboxes run."""

from typing import Annotated

import typer

from cli.console import print_found, print_json, say
from ratchet.errors import ConfigError

agents_app = typer.Typer(name="agents", help="Fetch and list the agent programs that boxes run.", no_args_is_help=True)


@agents_app.command(name="fetch")
def fetch_agent(
    names: Annotated[list[str], typer.Argument(help="Any of claude-code, codex, opencode, qwen-code, mini-swe-agent.")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Fetch pinned agent programs into ~/.cache/ratchet/agents, which every box mounts at /opt/agents. Idempotent.

    VIME_AGENT_CC_TARBALL and RATCHET_CODEX_TARBALL replace the npm packages, and VIME_AGENT_NODE_TARBALL npm's Node
    for a tarball of Claude Code that needs it.
    """
    from stack.agent_programs import FETCHABLE, fetch_program

    for name in names:
        if name not in FETCHABLE:
            raise ConfigError(f"no agent {name!r}; available: {', '.join(FETCHABLE)}")
    fetched = []
    for name in names:
        program = FETCHABLE[name]()
        directory = fetch_program(program, say)
        say(f"{name} {program.version}: {directory}")
        fetched.append(
            {
                "agent": program.name,
                "version": program.version,
                "directory": str(directory),
                "box_path": program.box_path,
            }
        )
    if json:
        print_json(fetched)


@agents_app.command(name="list")
def list_agents(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List the agent programs that have been fetched."""
    from stack.agent_programs import installed_programs

    found = installed_programs()
    columns = ["agent", "version", "source", "directory"]
    print_found(found, json, "agents", columns, [list(row.values()) for row in found])
