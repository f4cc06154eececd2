"""A command that waits for a workflow's result prints failures and waits until Temporal answers again."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from temporalio.service import RPCError, RPCStatusCode

from client import workflows
from ratchet.errors import ConfigError, MachineError
from ratchet.temporal_client import PendingActivity, starting
from stack.parts import Stack
from stack.supervisor import Supervisor


def test_a_failure_that_lasts_is_said_again_and_a_flood_is_not() -> None:
    failures = workflows.SaidFailures()
    refused = PendingActivity("boot", 3, "", "401: the key is wrong, box i3fz")
    assert failures.new_ones([refused], 0.0) == [
        "boot has failed 2 times and is tried again: 401: the key is wrong, box i3fz"
    ]
    other_box = PendingActivity("boot", 2, "", "401: the key is wrong, box i9aa")
    assert not failures.new_ones([refused, other_box], 30.0)
    assert len(failures.new_ones([refused], workflows._SAY_AGAIN_SECONDS)) == 1
    words = ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(100)]
    flood = [PendingActivity("boot", 2, "", f"odd answer: {word}") for word in words]
    assert len(failures.new_ones(flood, 31.0)) == workflows._MAX_KINDS - 1
    assert not failures.new_ones([PendingActivity("grade", 1, "working", "")], 32.0)


class _AwayHandle:
    """A handle of a workflow whose server gives these answers, one per call."""

    id = "admit/x"

    def __init__(self, *answers: "Exception | str") -> None:
        self.answers = list(answers)

    async def query(self, name: str, result_type: type) -> None:
        raise away()

    async def result(self) -> str:
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def away(status: RPCStatusCode = RPCStatusCode.UNAVAILABLE) -> RPCError:
    return RPCError("tcp connect error\n  connection refused", status, b"")


async def follow(stack: Stack, handle: _AwayHandle, said: list[str]) -> str:
    follow_through: Callable[..., Awaitable[str]] = workflows._follow_through_outages
    return await follow_through(stack, None, handle, "AdmitTasks", said.append)


async def test_a_server_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflows, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(Supervisor, "is_up", lambda self: True)
    said: list[str] = []
    assert await follow(Stack(tmp_path), _AwayHandle(away(), away(), "done"), said) == "done"
    assert said == ["Temporal does not answer (tcp connect error connection refused); admit/x is waited for"]


async def test_a_second_outage_is_said_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = asyncio.Event()

    async def look(client: None, workflow_id: str) -> list[PendingActivity]:
        looked.set()
        return []

    async def asks_for_long() -> str:
        await asyncio.sleep(0)
        if len(handle.answers) == 2:  # between the outages
            looked.clear()
            await looked.wait()
        return await _AwayHandle.result(handle)

    monkeypatch.setattr(workflows, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(workflows, "pending_activities", look)
    monkeypatch.setattr(Supervisor, "is_up", lambda self: True)
    handle = _AwayHandle(away(), away(), "done")
    handle.result = asks_for_long  # type: ignore[method-assign]
    said: list[str] = []
    async with asyncio.timeout(60):
        assert await follow(Stack(tmp_path), handle, said) == "done"
    assert len([line for line in said if "does not answer" in line]) == 2


async def test_a_workflow_that_is_lost_and_a_stack_that_is_stopped_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no workflow admit/x any more"):
        await follow(Stack(tmp_path), _AwayHandle(away(RPCStatusCode.NOT_FOUND)), [])
    with pytest.raises(MachineError, match="admit/x goes on after `ratchet up`"):
        await follow(Stack(tmp_path), _AwayHandle(away()), [])


def test_a_start_that_temporal_refuses_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"has not started admit/x .*too large"), starting("admit/x"):
        raise away(RPCStatusCode.INVALID_ARGUMENT)
    larger = RPCError("grpc: received message larger than max (5 vs. 4)", RPCStatusCode.RESOURCE_EXHAUSTED, b"")
    with pytest.raises(ConfigError, match="too large"), starting("admit/x"):
        raise larger
    for status in (RPCStatusCode.RESOURCE_EXHAUSTED, RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNAVAILABLE):
        with pytest.raises(MachineError, match="repeat the command"), starting("admit/x"):
            raise away(status)
