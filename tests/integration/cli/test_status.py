"""`ratchet status`, `doctor` and `logs` of stacks that run, hang, or do not exist."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stack.part_health import HealthState, PartHealth, write_health
from stack.parts import WATCHER, Part, Stack
from stack.supervisor import Supervisor
from tests.free_ports import free_ports
from tests.integration.ratchet_command import Ratchet

PASSWORD = "s3cr3t-of-ann"
DATABASE_URL = f"postgresql://ann:{PASSWORD}@a-database-server.example.org:15432/ratchet_of_ann?sslmode=require"


class Sleepers(Stack):
    """All parts of a stack, none of which does anything."""

    def parts(self) -> list[Part]:
        return [Part(part.name, ["sleep", "1000"], part.priority) for part in super().parts()]


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack on the user's own Postgres. Ending it takes seconds, so the tests share it."""
    home = tmp_path_factory.mktemp("sleepers")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("RATCHET_HOME", "TEMPORAL_ADDRESS", "RATCHET_TEMPORAL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("RATCHET_DATABASE_URL", DATABASE_URL)
        free_ports(home)
        stack = Sleepers(home)
        Supervisor(stack).up()
        yield stack
        Supervisor(stack).down()


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", DATABASE_URL)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def stack(sleepers: Stack, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The stack whose watcher has written one state of each kind, as the one of the commands."""
    monkeypatch.setenv("RATCHET_HOME", str(sleepers.home))
    now, states = time.time(), list(HealthState)
    parts = [part.name for part in sleepers.parts() if part.name != WATCHER]
    reason, error = "no answer within 60 s", "RuntimeError: head size 96 is not supported " + 200 * "x"
    health = [PartHealth(name, states[n % len(states)], now - 90, reason) for n, name in enumerate(parts)]
    health[1].restarts = 12
    health[1].last_error = error
    write_health(sleepers.home, health, now)
    os.utime(sleepers.home / "health.json", (now + 3600, now + 3600))  # fresh, however slow the machine is
    return sleepers


def test_each_part_has_one_line_of_80_columns_and_its_whole_address(stack: Stack, ratchet: Ratchet) -> None:
    shown = ratchet("status")
    assert shown.code == 0 and PASSWORD not in shown.output + shown.error
    lines = shown.output.splitlines()
    for part in stack.parts():
        (line,) = [line for line in lines if line.split()[0] == part.name]
        assert len(line) <= 80 and stack.addresses().get(part.name, "") in line
    assert any("restarts" in line for line in lines) and "head size 96" in shown.output


def test_json_has_state_reason_restarts_and_last_error(stack: Stack, ratchet: Ratchet) -> None:
    shown = ratchet("status", "--json")
    assert shown.code == 0 and PASSWORD not in shown.output
    parts: dict[str, Any] = {part["name"]: part for part in json.loads(shown.output)["parts"]}
    assert set(parts) == {part.name for part in stack.parts()}
    restarted = next(part for part in parts.values() if part["restarts"])
    assert restarted["restarts"] == 12 and "head size 96" in restarted["last_error"]
    assert restarted["problem"].startswith("starting for ") and "no answer within 60 s" in restarted["problem"]


def test_a_state_that_is_not_written_any_more_is_not_shown(stack: Stack, ratchet: Ratchet) -> None:
    """Without what a watcher saw the processes' states are shown, and that they are not probed."""
    old = time.time() - 3600
    os.utime(stack.home / "health.json", (old, old))
    shown = ratchet("status")
    assert "the watcher has not looked at them lately" in shown.output
    assert "answering" not in shown.output and "given up" not in shown.output


def test_a_stopped_stack_is_stopped(tmp_path: Path, ratchet: Ratchet, monkeypatch: pytest.MonkeyPatch) -> None:
    free_ports(tmp_path)
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    health = [PartHealth("engine", HealthState.ANSWERING, time.time())]
    write_health(tmp_path, health, time.time())
    states = {part["name"]: part["state"] for part in json.loads(ratchet("status", "--json").output)["parts"]}
    assert set(states.values()) == {"stopped"}


def test_doctor_checks_the_living_parts(stack: Stack, ratchet: Ratchet) -> None:
    shown = ratchet("doctor", "--json")
    assert shown.output, shown.error
    checks = {check["what"]: check for check in json.loads(shown.output)}
    failing = [what for what, check in checks.items() if what.startswith("part ") and not check["ok"]]
    assert failing and shown.code == 1 and PASSWORD not in shown.output


def test_logs_without_a_part_lists_them(stack: Stack, ratchet: Ratchet) -> None:
    shown = ratchet("admin", "logs")
    assert shown.code == 0 and {"engine", "adapter", "supervisord"} <= set(shown.output.split())
