"""Boxes and gateways that outlive each other."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ratchet.errors import SandboxBusyError, SandboxGoneError
from sandbox_gateway.box_end import kill_processes
from sandboxes.base import Sandbox
from sandboxes.e2b import E2BProvider
from tests.integration.sandbox_gateway.conftest import (
    API_KEY,
    CHECKOUT,
    GatewayProcess,
    boxd_pid,
    eventually,
    make_box,
    wait_for_end,
)

_COMMAND = "for i in $(seq 30); do echo line $i; sleep 0.05; done; exit 3"
_LAUNCHER = """\
import asyncio, os, sys
from e2b import AsyncSandbox

async def main():
    box = await AsyncSandbox.connect(sys.argv[1], api_key=sys.argv[2], api_url=sys.argv[3], sandbox_url=sys.argv[3])
    handle = await box.commands.run(sys.argv[4], background=True, timeout=0)
    print(handle.pid, flush=True)
    os._exit(0)

asyncio.run(main())
"""
_ALL_LINES = "".join(f"line {number}\n" for number in range(1, 31))


def _start_detached(gateway: GatewayProcess, box: Sandbox) -> int:
    """Let a client process start a command and die at once; return the command's pid."""
    command = [sys.executable, "-c", _LAUNCHER, box.id, API_KEY, gateway.url, _COMMAND]
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT, env=environment)
    return int(done.stdout)


async def _start_and_disconnect(gateway: GatewayProcess, box_id: str) -> int:
    from e2b import AsyncSandbox

    box = await AsyncSandbox.connect(box_id, api_key=API_KEY, api_url=gateway.url, sandbox_url=gateway.url)
    handle = await box.commands.run(_COMMAND, background=True, timeout=0)
    await handle.disconnect()
    return int(handle.pid)


async def _reattach(gateway: GatewayProcess, box_id: str, pid: int) -> tuple[int, str]:
    from e2b import AsyncSandbox, CommandExitException

    box = await AsyncSandbox.connect(box_id, api_key=API_KEY, api_url=gateway.url, sandbox_url=gateway.url)
    handle = await box.commands.connect(pid, timeout=30)
    try:
        result = await handle.wait()
        return result.exit_code, result.stdout
    except CommandExitException as ended:
        return ended.exit_code, ended.stdout


async def test_a_second_process_sees_everything_from_the_first_byte(gateway: GatewayProcess, box: Sandbox) -> None:
    pid = await asyncio.to_thread(_start_detached, gateway, box)
    assert await _reattach(gateway, box.id, pid) == (3, _ALL_LINES)
    assert await _reattach(gateway, box.id, pid) == (3, _ALL_LINES)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_boxes_outlive_the_gateway(
    own_gateway: GatewayProcess, own_provider: E2BProvider, how: signal.Signals
) -> None:
    box = await make_box(own_provider)
    await box.write_file("/workspace/kept", b"kept")
    pid = await _start_and_disconnect(own_gateway, box.id)
    await asyncio.to_thread(own_gateway.end, how)
    await asyncio.to_thread(own_gateway.start)
    assert await _reattach(own_gateway, box.id, pid) == (3, _ALL_LINES)
    assert await box.read_file("/workspace/kept") == b"kept"
    (info,) = await own_provider.list({"owner": "test"})
    assert info.id == box.id
    await box.kill()
    assert await own_provider.list({}) == []


async def test_create_is_idempotent_also_across_a_restart(
    own_gateway: GatewayProcess, own_provider: E2BProvider
) -> None:
    key = uuid.uuid4().hex
    boxes = await asyncio.gather(*(make_box(own_provider, key) for _ in range(4)))
    assert len({box.id for box in boxes}) == 1
    await asyncio.to_thread(own_gateway.end, signal.SIGKILL)
    await asyncio.to_thread(own_gateway.start)
    again = await make_box(own_provider, key)
    assert again.id == boxes[0].id
    assert len(await own_provider.list({})) == 1
    await again.kill()
    assert (await make_box(own_provider, key)).id != again.id


async def test_a_killed_fork_server_is_started_anew(own_gateway: GatewayProcess, own_provider: E2BProvider) -> None:
    first = await make_box(own_provider)
    own_gateway.kill_fork_server()
    second = await make_box(own_provider)
    for box in (first, second):
        assert (await box.exec("echo here")).stdout == "here\n"


async def test_the_gateway_ends_a_box_at_its_ttl(provider: E2BProvider, gateway: GatewayProcess) -> None:
    box = await make_box(provider, ttl_seconds=1)

    async def gone() -> bool:
        try:
            await box.exec("true")
        except SandboxGoneError:
            return not gateway.box_directory(box.id).exists()
        return False

    await eventually(gone)


async def test_set_ttl_moves_the_end_both_ways(provider: E2BProvider, gateway: GatewayProcess) -> None:
    box = await make_box(provider, ttl_seconds=60)
    end = gateway.call("GET", f"/sandboxes/{box.id}").json()["endAt"]
    await box.set_ttl(1800)
    assert gateway.call("GET", f"/sandboxes/{box.id}").json()["endAt"] > end
    await box.set_ttl(0)
    with pytest.raises(SandboxGoneError):
        await box.exec("true")


async def test_a_box_ends_itself_without_a_gateway_and_is_cleared_away(
    own_gateway: GatewayProcess, own_provider: E2BProvider
) -> None:
    box = await make_box(own_provider, ttl_seconds=60)
    other = await make_box(own_provider, ttl_seconds=60)
    boxd = os.pidfd_open(boxd_pid(own_gateway, box.id))
    await box.set_ttl(1)
    await asyncio.to_thread(own_gateway.end, signal.SIGKILL)
    assert await asyncio.to_thread(wait_for_end, boxd, 15), "the box did not end"
    os.close(boxd)
    await asyncio.to_thread(own_gateway.start)
    assert [info.id for info in await own_provider.list({})] == [other.id]
    assert not own_gateway.box_directory(box.id).exists()


async def test_a_dead_boxd_takes_its_box_along(own_gateway: GatewayProcess, own_provider: E2BProvider) -> None:
    box = await make_box(own_provider)
    os.kill(boxd_pid(own_gateway, box.id), signal.SIGKILL)

    async def gone() -> bool:
        return not own_gateway.box_directory(box.id).exists()

    await eventually(gone)
    with pytest.raises(SandboxGoneError):
        await box.exec("true")
    assert _cgroups_named(box.id) == []


async def test_kill_leaves_nothing(provider: E2BProvider, gateway: GatewayProcess) -> None:
    box = await make_box(provider)
    await box.exec("(setsid sleep 300 &) ; echo x > /workspace/x")
    pid = boxd_pid(gateway, box.id)
    await box.kill()

    async def nothing_left() -> bool:
        trash = list((gateway.settings.root_directory / "trash").iterdir())
        return not trash and not gateway.box_directory(box.id).exists() and not Path(f"/proc/{pid}").exists()

    await eventually(nothing_left)
    assert _cgroups_named(box.id) == []


def _cgroups_named(box_id: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"*/ratchet-*/{box_id}")) + list(
        Path("/sys/fs/cgroup").glob(f"ratchet-*/{box_id}")
    )


async def test_output_that_a_full_disk_does_not_take_is_an_error_and_no_result(
    gateway: GatewayProcess, box: Sandbox
) -> None:
    """The command itself succeeds, with less output than it wrote. Its caller may repeat it."""
    (gateway.box_directory(box.id) / "spool" / "1").symlink_to("/dev/full")
    with pytest.raises(SandboxBusyError, match="No space left on device"):
        await box.exec("echo one; sleep 0.2; echo two")
    assert (await box.exec("echo three")).stdout == "three\n"


async def test_a_full_disk_of_the_gateway_is_a_shortage_and_no_bug(gateway: GatewayProcess, box: Sandbox) -> None:
    record = gateway.box_directory(box.id) / "box.json.new"
    record.symlink_to("/dev/full")
    with pytest.raises(SandboxBusyError, match="No space left on device"):
        await box.set_ttl(600)
    record.unlink()
    await box.set_ttl(600)


async def test_a_box_whose_record_cannot_be_read_for_a_moment_lives(
    own_gateway: GatewayProcess, own_provider: E2BProvider
) -> None:
    """It was destroyed before, as was every box if the gateway had no descriptors at its start."""
    box = await make_box(own_provider)
    await box.write_file("/workspace/kept", b"kept")
    await asyncio.to_thread(own_gateway.end, signal.SIGKILL)
    record = own_gateway.box_directory(box.id) / "box.json"
    record.rename(record.with_name("aside"))
    record.mkdir()  # reading it is an OSError, for root, too
    await asyncio.to_thread(own_gateway.start)
    for call in (own_provider.connect(box.id), own_provider.kill(box.id), make_box(own_provider)):
        with pytest.raises(SandboxBusyError):
            await call
    record.rmdir()
    record.with_name("aside").rename(record)

    async def adopted() -> bool:
        return [info.id for info in await own_provider.list({"owner": "test"})] == [box.id]

    await eventually(adopted)
    assert await box.read_file("/workspace/kept") == b"kept"
    async with await make_box(own_provider) as other:
        assert (await other.exec("echo here")).stdout == "here\n"


async def test_a_box_that_does_not_answer_for_a_moment_lives(
    own_gateway: GatewayProcess, own_provider: E2BProvider
) -> None:
    key = uuid.uuid4().hex
    box = await make_box(own_provider, key)
    boxd = boxd_pid(own_gateway, box.id)
    os.kill(boxd, signal.SIGSTOP)
    try:
        await asyncio.to_thread(own_gateway.end, signal.SIGKILL)
        await asyncio.to_thread(own_gateway.start)
    finally:
        os.kill(boxd, signal.SIGCONT)
    assert (await make_box(own_provider, key)).id == box.id
    assert (await box.exec("echo here")).stdout == "here\n"


async def test_what_dead_boxes_have_left_is_cleared_away(
    own_gateway: GatewayProcess, own_provider: E2BProvider
) -> None:
    boxes = [await make_box(own_provider) for _ in range(3)]
    await asyncio.to_thread(own_gateway.end, signal.SIGKILL)
    for box in boxes:
        await asyncio.to_thread(_kill_and_wait, boxd_pid(own_gateway, box.id))
    directories = [own_gateway.box_directory(box.id) for box in boxes]
    (directories[0] / "box.json").unlink()
    (directories[1] / "box.json").write_text('{"id": ')
    await asyncio.to_thread(own_gateway.start)
    assert not any(directory.exists() for directory in directories)
    assert [group for box in boxes for group in _cgroups_named(box.id)] == []
    async with await make_box(own_provider) as other:
        assert (await other.exec("echo here")).stdout == "here\n"


async def test_a_hung_boxd_beyond_its_time_is_ended_before_its_slot_is_free(
    own_gateway: GatewayProcess, own_provider: E2BProvider
) -> None:
    """Its processes are in no control group of its own, and its record names none, as on a machine without them."""
    box = await make_box(own_provider)
    boxd = boxd_pid(own_gateway, box.id)
    for group in _cgroups_named(box.id):
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent.parent / "cgroup.procs").write_text(pid)
    watched = os.pidfd_open(boxd)
    os.kill(boxd, signal.SIGSTOP)
    try:
        await asyncio.to_thread(own_gateway.end, signal.SIGKILL)
        path = own_gateway.box_directory(box.id) / "box.json"
        record = json.loads(path.read_text())
        record["spec"]["cgroup"] = ""
        path.write_text(json.dumps({**record, "deadline": 0.0}))
        await asyncio.to_thread(own_gateway.start)

        async def is_gone() -> bool:
            return not own_gateway.box_directory(box.id).exists()

        await eventually(is_gone)
        assert wait_for_end(watched, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watched, signal.SIGKILL)
        os.close(watched)


async def test_a_paused_box_whose_boxd_hangs_can_be_ended(
    own_gateway: GatewayProcess, own_provider: E2BProvider
) -> None:
    """A process in a frozen control group of version 1 dies only after the thaw."""
    box = await make_box(own_provider)
    await box.exec("(setsid sleep 300 &)")
    boxd = boxd_pid(own_gateway, box.id)
    paused = await asyncio.to_thread(own_gateway.call, "POST", f"/sandboxes/{box.id}/pause")
    assert paused.status_code == 204, paused.text
    os.kill(boxd, signal.SIGSTOP)
    assert await asyncio.to_thread(kill_processes, own_gateway.box_directory(box.id), 10) == []


async def test_a_hung_box_whose_directory_was_moved_away_can_be_ended(
    own_gateway: GatewayProcess, own_provider: E2BProvider
) -> None:
    box = await make_box(own_provider)
    boxd = boxd_pid(own_gateway, box.id)
    watched = os.pidfd_open(boxd)
    os.kill(boxd, signal.SIGSTOP)
    try:
        directory = own_gateway.box_directory(box.id)
        directory.rename(directory.parent.parent / "moved")
        killed = await asyncio.to_thread(own_gateway.call, "DELETE", f"/sandboxes/{box.id}")
        assert killed.status_code == 204, killed.text
        assert wait_for_end(watched, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watched, signal.SIGKILL)
        os.close(watched)
    assert (await (await make_box(own_provider)).exec("echo here")).stdout == "here\n"


def _kill_and_wait(pid: int) -> None:
    watched = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(watched, 60)
    os.close(watched)
