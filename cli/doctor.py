"""`ratchet doctor`: check what this machine has and tell how to get what is missing."""

from typing import Annotated, Any

import typer


def doctor(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Check this machine: sandbox protections, programs, disk, ports. Exit code 1 if something required is missing."""
    from cli.console import print_json, print_table

    checks = _checks()
    if json:
        print_json(checks)
    else:
        print_table(
            "doctor",
            ["", "what", "detail"],
            [["ok" if check["ok"] else "NO", check["what"], check["detail"]] for check in checks],
        )
    if not all(check["ok"] or not check["needed"] for check in checks):
        raise typer.Exit(1)


def _checks() -> list[dict[str, Any]]:
    import shutil

    from ratchet import paths
    from ratchet.errors import MachineError
    from sandbox_gateway import machine_probe
    from stack.parts import Stack, require_space

    checks = [
        {
            "what": protection.name,
            "ok": protection.on,
            "needed": protection.name in ("bubblewrap", "root"),
            "detail": protection.reason,
        }
        for protection in machine_probe.probe_machine()
    ]
    stack = Stack()
    try:
        require_space(stack.home)
        free = shutil.disk_usage(stack.home).free >> 30
        checks.append({"what": "disk", "ok": True, "needed": True, "detail": f"{free} GiB free at {stack.home}"})
    except MachineError as error:
        checks.append({"what": "disk", "ok": False, "needed": True, "detail": str(error)})
    temporal = shutil.which("temporal") or str(paths.cache() / "bin" / "temporal")
    there = bool(shutil.which(temporal))
    checks.append(
        {
            "what": "temporal program",
            "ok": there,
            "needed": True,
            "detail": temporal if there else "run `ratchet setup`",
        }
    )
    ports = ", ".join(f"{name} {port}" for name, port in stack.ports.items())
    checks.append({"what": "ports", "ok": True, "needed": False, "detail": ports})
    return checks
