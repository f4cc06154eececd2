"""The sandbox contract: one suite that every back end must pass.

A back end's test file imports it and defines fixtures `provider`, `box` and `adapter_address` (host:port as a box
reaches it, of an HTTP server that answers ADAPTER_ANSWER), and an image called `host` with bash, coreutils, procps, a
user `agent` and a directory /workspace. The local gateway (`test_contract.py`) and Docker
(`tests/e2e/sandboxes/test_docker.py`) run it.
"""

import asyncio
import contextlib
import os
import shlex
import uuid
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.errors import CommandFailedError, ConfigError, SandboxGoneError
from sandboxes.base import BoxLimits, Sandbox, SandboxProvider
from tests.integration.sandbox_gateway.conftest import ADAPTER_ANSWER, eventually, make_box


async def test_exec_returns_output_and_exit_code(box: Sandbox) -> None:
    result = await box.exec("echo out; echo err >&2; exit 3", check=False)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")


async def test_error_output_is_seen_while_the_command_runs(box: Sandbox) -> None:
    pieces: list[str] = []
    running = asyncio.create_task(box.exec("echo one >&2; sleep 60", timeout=5, on_stderr=pieces.append))

    async def seen() -> bool:
        return "".join(pieces) == "one\n"

    await eventually(seen)
    assert not running.done()
    with pytest.raises(CommandFailedError):
        await running


async def test_exec_check_raises_with_what_was_printed(box: Sandbox) -> None:
    with pytest.raises(CommandFailedError) as failed:
        await box.exec("echo before; exit 4")
    assert (failed.value.exit_code, failed.value.stdout, failed.value.timed_out) == (4, "before\n", False)


@pytest.mark.parametrize("check", [True, False])
async def test_exec_timeout_always_raises_and_kills(box: Sandbox, check: bool) -> None:
    with pytest.raises(CommandFailedError) as failed:
        await box.exec("echo begun; sleep 60", timeout=0.5, check=check)
    assert failed.value.timed_out and failed.value.exit_code is None
    assert failed.value.stdout == "begun\n"

    async def gone() -> bool:
        return (await box.exec("pgrep -fx 'sleep 60'", check=False)).exit_code == 1

    await eventually(gone)


async def test_exec_without_timeout(box: Sandbox) -> None:
    assert (await box.exec("sleep 0.2; echo done", timeout=None)).stdout == "done\n"


async def test_exec_env_cwd_and_home(box: Sandbox) -> None:
    assert (await box.exec('echo "$A:$PWD"', env={"A": "x y"}, cwd="/workspace")).stdout == "x y:/workspace\n"
    assert (await box.exec("pwd; whoami; id -u", user="agent")).stdout == "/home/agent\nagent\n1000\n"


@pytest.mark.parametrize(("user", "cwd"), [("nobody-here", None), ("root", "/not/there")])
async def test_a_command_that_cannot_start_is_a_failed_command(box: Sandbox, user: str, cwd: str | None) -> None:
    assert (await box.exec("true", check=False, user=user, cwd=cwd)).exit_code == 126
    with pytest.raises(CommandFailedError):
        await box.exec("true", user=user, cwd=cwd)


async def test_big_output_arrives_whole(box: Sandbox) -> None:
    result = await box.exec("head -c 3000000 /dev/zero | tr '\\0' x")
    assert result.stdout == "x" * 3_000_000


async def test_a_background_child_that_redirects_its_output_does_not_hold_the_call(box: Sandbox) -> None:
    """Services may wait for every process that holds the output, as E2B's own do."""
    assert (await box.exec("sleep 300 >/dev/null 2>&1 & echo started", timeout=20)).stdout == "started\n"


async def test_files_of_five_megabytes_both_ways(box: Sandbox, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    local = tmp_path / "local.bin"
    local.write_bytes(data)
    await box.write_file("/workspace/deep/er/a.bin", data)
    await box.write_file("/workspace/b.bin", local)
    assert await box.read_file("/workspace/deep/er/a.bin") == data
    assert await box.read_file("/workspace/b.bin") == data


async def test_text_files_and_owners(box: Sandbox) -> None:
    await box.write_file("notes.txt", "grüße\n", user="agent")
    assert await box.read_file("/home/agent/notes.txt") == "grüße\n".encode()
    assert (await box.exec("stat -c %U:%G /home/agent/notes.txt")).stdout == "agent:agent\n"
    await box.write_file("/workspace/empty", b"")
    assert await box.read_file("/workspace/empty") == b""
    await box.write_file("/workspace/empty", "shorter")
    await box.write_file("/workspace/empty", "new")
    assert await box.read_file("/workspace/empty") == b"new"


async def test_a_big_file_is_read_in_part(box: Sandbox) -> None:
    data = os.urandom(9_000_000)
    await box.write_file("/workspace/big.bin", data)
    for num_bytes in (0, 1, 100_001, 8_999_999):
        assert await box.read_file("/workspace/big.bin", max_bytes=num_bytes) == data[:num_bytes]
    assert await box.read_file("/workspace/big.bin", max_bytes=20_000_000) == data


async def test_missing_and_unreadable_files(box: Sandbox) -> None:
    def reads(path: str) -> tuple[Coroutine[Any, Any, object], ...]:
        return box.read_file(path), box.read_file(path, max_bytes=5)

    for read in reads("/workspace/missing"):
        with pytest.raises(FileNotFoundError):
            await read
    for refused in ("/workspace", "/dev/zero"):
        for read in reads(refused):
            with pytest.raises(CommandFailedError):
                await read


async def test_two_users_are_apart(box: Sandbox) -> None:
    await box.exec("echo secret > /root/secret; echo x > /tmp/of-root")
    denied = "cat /root/secret || touch /usr/x || touch /etc/x || rm /tmp/of-root || kill -9 1"
    assert (await box.exec(denied, user="agent", check=False)).exit_code != 0
    assert (await box.exec("touch /tmp/a ~/b", user="agent")).exit_code == 0
    assert (await box.exec("ls /tmp/a /home/agent/b /tmp/of-root")).stdout == "/home/agent/b\n/tmp/a\n/tmp/of-root\n"


async def test_a_killed_box_is_gone(provider: SandboxProvider) -> None:
    box = await make_box(provider)
    await box.kill()
    await box.kill()
    assert await provider.kill(box.id) is False
    for call in (
        box.exec("true"),
        box.read_file("/x"),
        box.write_file("/tmp/x", b""),
        box.set_ttl(5),
        provider.connect(box.id),
    ):
        with pytest.raises(SandboxGoneError):
            await call


async def test_kill_ends_a_running_command(provider: SandboxProvider) -> None:
    box = await make_box(provider)
    running = asyncio.create_task(box.exec("echo up > /tmp/up; sleep 60"))

    async def begun() -> bool:
        return (await box.exec("test -e /tmp/up", check=False)).exit_code == 0

    await eventually(begun)
    await box.kill()
    with pytest.raises(SandboxGoneError):
        await running


async def test_list_filters_by_metadata(provider: SandboxProvider) -> None:
    tag = uuid.uuid4().hex
    boxes = []
    for name in ("a", "b&c=d e%"):
        metadata = {"tag": tag, "name": name}
        boxes.append(await provider.create("host", ttl_seconds=60, metadata=metadata, idempotency_key=uuid.uuid4().hex))
    found = await provider.list({"tag": tag})
    assert {info.id for info in found} == {box.id for box in boxes}
    (only,) = await provider.list({"tag": tag, "name": "b&c=d e%"})
    assert (only.id, only.state, only.metadata["name"]) == (boxes[1].id, "running", "b&c=d e%")
    assert only.started_at.tzinfo is not None
    assert await provider.list({"tag": "other"}) == []
    again = await provider.describe(only.id)
    assert (again.id, again.state, again.metadata) == (only.id, only.state, only.metadata)
    await boxes[1].kill()
    with pytest.raises(SandboxGoneError):
        await provider.describe(only.id)
    for box in boxes:
        await box.kill()


async def test_a_command_is_cancelled_at_any_moment(box: Sandbox) -> None:
    for step in range(100):
        running = asyncio.create_task(box.exec("sleep 0.02"))
        await asyncio.sleep(0.0006 * step)
        if running.cancel():
            with pytest.raises(asyncio.CancelledError):
                await running


async def test_clean_up_after_a_cancellation_runs_undisturbed(box: Sandbox) -> None:
    async def work() -> str:
        try:
            await box.exec("sleep 60")
        finally:
            cleaned.append((await box.exec("echo cleaned")).stdout)
        raise AssertionError("not cancelled")

    cleaned: list[str] = []
    running = asyncio.create_task(work())
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned == ["cleaned\n"]


async def test_the_same_key_gives_the_same_box(provider: SandboxProvider) -> None:
    key = uuid.uuid4().hex
    first, second = await asyncio.gather(make_box(provider, key), make_box(provider, key))
    third = await make_box(provider, key)
    assert first.id == second.id == third.id
    await first.exec("echo one > /tmp/x")
    assert await third.read_file("/tmp/x") == b"one\n"
    await first.kill()


async def test_a_box_ends_at_its_time_to_live(provider: SandboxProvider) -> None:
    """Connecting does not change the time to live."""
    box = await make_box(provider, ttl_seconds=600)
    await box.set_ttl(4)
    with contextlib.suppress(SandboxGoneError):  # a slow machine may be too late
        await provider.connect(box.id)

    async def gone() -> bool:
        return box.id not in {info.id for info in await provider.list({"owner": "test"})}

    await eventually(gone, 60)
    with pytest.raises(SandboxGoneError):
        await provider.connect(box.id)


async def test_an_unknown_image_is_the_users_mistake(provider: SandboxProvider) -> None:
    with pytest.raises(ConfigError, match="no/such:image"):
        await provider.create("no/such:image", ttl_seconds=5, metadata={}, idempotency_key=uuid.uuid4().hex)


_OUTSIDE = ("1.1.1.1:80", "example.com:80", "169.254.169.254:80", "192.0.2.1:80", "[2606:4700:4700::1111]:80")


def _answering(addresses: Iterable[str]) -> str:
    """Return a command that prints the addresses that answer an HTTP request with at least one byte.

    A connection alone proves nothing: some services accept it first and decide then.
    """
    calls = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        ask = f"exec 3<>/dev/tcp/{host.strip('[]')}/{port} && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && head -c 1 <&3"
        calls.append(f"( timeout 10 bash -c {shlex.quote(ask)} 2>/dev/null | grep -q . && echo '{address}' ) &")
    return "\n".join([*calls, "wait"])


@pytest.mark.parametrize("user", ["root", "agent"])
async def test_an_agents_box_reaches_the_adapter_and_nothing_else(
    box: Sandbox, adapter_address: str, outside_address: str, user: str
) -> None:
    assert httpx.get(f"http://{outside_address}/", trust_env=False, timeout=60).content == ADAPTER_ANSWER
    tried = _answering([adapter_address, outside_address, *_OUTSIDE])
    assert (await box.exec(tried, user=user)).stdout.split() == [adapter_address]


async def test_a_box_without_network_reaches_nothing(
    provider: SandboxProvider, adapter_address: str, outside_address: str
) -> None:
    async with await make_box(provider, network=False) as box:
        for user in ("root", "agent"):
            assert (await box.exec(_answering([adapter_address, outside_address, *_OUTSIDE]), user=user)).stdout == ""


@pytest.mark.parametrize(
    "limits", [BoxLimits(memory_bytes=128 << 20), BoxLimits(num_cpus=1), BoxLimits(max_processes=128)]
)
async def test_limits_are_set_or_refused(provider: SandboxProvider, limits: BoxLimits) -> None:
    """A service that cannot set a limit says so; `capabilities` tells beforehand."""
    made = provider.create(
        "host", ttl_seconds=60, metadata={"owner": "test"}, idempotency_key=uuid.uuid4().hex, limits=limits
    )
    if provider.capabilities.limits:
        await (await made).kill()
    else:
        with pytest.raises(ConfigError):
            await made


async def test_of_several_kills_one_says_that_the_box_existed(provider: SandboxProvider) -> None:
    for _ in range(3):
        box = await make_box(provider)
        assert sorted(await asyncio.gather(*(provider.kill(box.id) for _ in range(4)))) == [False, False, False, True]
