"""`ratchet doctor`: check what this machine has and what the stack does, and tell how to get what is missing."""

import asyncio
import os
import time
from typing import Annotated, Any

import typer

from cli.console import print_found
from ratchet.errors import MachineError, RatchetError
from sandboxes import docker_settings
from stack.parts import Stack
from stack.temporal_build import server_program
from stack.temporal_server import TemporalKind, installed_temporal_cli, temporal_kind


def doctor(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Check this machine (sandbox protections, programs, disk, ports) and the parts of a running stack.

    Exit code 1 if something required is missing or does not work.
    """
    checks = _checks()
    rows = [["ok" if check["ok"] else "NO", check["what"], check["detail"]] for check in checks]
    print_found(checks, json, "doctor", ["", "what", "detail"], rows, breaks_last=True)
    if not all(check["ok"] or not check["needed"] for check in checks):
        raise typer.Exit(1)


def _checks() -> list[dict[str, Any]]:
    from ratchet.disk_space import free_space, require_space
    from stack.supervisor import Supervisor

    stack = Stack()
    checks = _sandbox_checks(stack)
    try:
        require_space(stack.home)
        free = free_space(stack.home).free_bytes >> 30
        checks.append(_check("disk", True, f"{free} GiB free at {stack.home}"))
    except MachineError as error:
        checks.append(_check("disk", False, str(error)))
    if not stack.is_external("TEMPORAL_ADDRESS"):
        checks.append(_temporal_check(stack))
    checks.append(_huge_pages_check())
    ports = ", ".join(f"{name} {port}" for name, port in stack.ports.items())
    checks.append(_check("ports", True, ports, needed=False))
    if Supervisor(stack).is_up():
        checks += [*_part_checks(stack), *_ownership_checks(stack)]
    return checks


def _check(what: str, ok: bool, detail: str, needed: bool = True) -> dict[str, Any]:
    return {"what": what, "ok": ok, "needed": needed, "detail": detail}


def _sandbox_checks(stack: Stack) -> list[dict[str, Any]]:
    """Return the checks of what the chosen provider of boxes needs on this machine."""
    from sandbox_gateway import machine_probe
    from sandboxes.registry import sandbox_provider
    from stack.docker_egress import require_docker_egress

    if stack.has_gateway:
        return [
            _check(one.name, one.on, one.reason, needed=one.name in machine_probe.NEEDED)
            for one in machine_probe.probe_machine()
        ]
    provider = os.environ.get("RATCHET_SANDBOX_PROVIDER") or "e2b"
    what = f"boxes of {provider}"
    if docker_settings.needs_egress():
        try:
            asyncio.run(require_docker_egress())
        except MachineError as error:
            return [_check(what, False, str(error))]
    try:
        service = sandbox_provider()
        asyncio.run(service.list({"ratchet_probe": "doctor"}))
    except RatchetError as error:
        return [_check(what, False, str(error))]
    detail = f"{getattr(service, 'url', provider)} lists its boxes"
    without = (f"without: {one}" for one in service.capabilities.without)
    return [_check(what, True, "; ".join([detail, *without]))]


def _huge_pages_check() -> dict[str, Any]:
    from stack.huge_pages import advice, kernel_setting

    setting = kernel_setting()
    found = advice(setting, os.environ)
    return _check("huge pages", not found, found or f"transparent huge pages: {setting or 'none'}", needed=False)


def _temporal_check(stack: Stack) -> dict[str, Any]:
    kind = temporal_kind(stack.home)
    program = server_program() if kind is TemporalKind.SERVER else installed_temporal_cli()
    there = program is not None and program.is_file()
    detail = f"{kind}: {program}" if there else f"{kind}: run `ratchet admin setup`"
    return _check("temporal program", there, detail)


def _ownership_checks(stack: Stack) -> list[dict[str, Any]]:
    """Return the checks of the database and the namespace that a running stack works with."""
    from stack.ownership import check_ownership

    return [
        _check(one.what, not one.problem, one.problem or "as `ratchet up` left it")
        for one in asyncio.run(check_ownership(stack))
    ]


def _part_checks(stack: Stack) -> list[dict[str, Any]]:
    from stack.part_health import HealthState, read_health

    works = (HealthState.ANSWERING, HealthState.SLOW, HealthState.STARTING)
    return [
        _check(f"part {part.name}", part.state in works, part.summary(time.time()) or part.detail or part.state)
        for part in read_health(stack.home).values()
    ]
