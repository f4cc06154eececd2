"""A container's output counts only if the sender has said that it is complete. Nothing is executed here."""

import asyncio
import base64
import hashlib
import os
from collections.abc import AsyncIterator

import aiodocker
import pytest

from activities.diff import capture_diff
from activities.harnesses import launcher
from ratchet.errors import CommandFailedError, ConfigError, SandboxBusyError, SandboxGoneError
from sandboxes import docker_box
from sandboxes.docker import DockerProvider
from sandboxes.docker_box import DockerSandbox
from tests.standins.docker_daemon import DockerDaemonStandin, RecordedExec, recorded

PATCH = b"diff --git a/x.py b/x.py\n+line\n"
PRINTED_DIFF = f"1 {len(PATCH)} {hashlib.sha256(PATCH).hexdigest()}\n{base64.b64encode(PATCH).decode()}\n".encode()


@pytest.fixture
async def daemon() -> AsyncIterator[DockerDaemonStandin]:
    async with DockerDaemonStandin() as running:
        yield running


@pytest.fixture
async def box(daemon: DockerDaemonStandin, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DockerSandbox]:
    monkeypatch.setattr(docker_box, "_REMOVAL_SECONDS", 0.0)
    async with aiodocker.Docker(url=daemon.url) as client:
        yield DockerSandbox(client.containers.container("C1"))


async def test_a_whole_command(daemon: DockerDaemonStandin, box: DockerSandbox) -> None:
    seen: list[str] = []
    daemon.played = recorded(b"out\n", b"err\n", exit_code=3)
    result = await box.exec("anything", check=False, on_stderr=seen.append)
    assert (result.exit_code, result.stdout, result.stderr, "".join(seen)) == (3, "out\n", "err\n", "err\n")
    with pytest.raises(CommandFailedError) as failed:
        await box.exec("anything")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "out\n")
    daemon.played = recorded(PRINTED_DIFF)
    assert (await capture_diff(box, "/w", 1000, 30)).diff == PATCH


async def test_a_closed_network_is_taken_from_the_container(daemon: DockerDaemonStandin, box: DockerSandbox) -> None:
    daemon.answers["json"] = {"Id": "C1", "NetworkSettings": {"Networks": {"bridge": {"NetworkID": "N1"}}}}
    await box.set_network(True)
    assert daemon.asked[-1] == ("/networks/C1/disconnect", {"Container": "C1", "Force": True})


async def test_binary_files_in_pieces(daemon: DockerDaemonStandin, box: DockerSandbox) -> None:
    data = os.urandom(300_000)
    whole = recorded(data)
    pieces = [(1, data[start : start + 1000]) for start in range(0, len(data), 1000)]
    daemon.played = RecordedExec([*pieces, *whole.frames[2:]])
    assert await box.read_file("/file") == data
    daemon.played = recorded(exit_code=144)
    with pytest.raises(FileNotFoundError):
        await box.read_file("/file")


@pytest.mark.parametrize("by_reset", [False, True])
async def test_output_that_is_cut_is_no_output(daemon: DockerDaemonStandin, box: DockerSandbox, by_reset: bool) -> None:
    """It was the whole output before: the connection's end looks like the output's, and the command had ended well."""
    whole = recorded(PRINTED_DIFF)
    needed = len(whole.stream_bytes(b"\x1e" + b"0" * 32)) - 1
    for cut_after in [*range(0, needed, 23), needed - 1]:
        daemon.played = RecordedExec(whole.frames, cut_after=cut_after, by_reset=by_reset)
        for call in (
            box.exec("anything"),
            box.exec("anything", check=False, timeout=None),
            box.read_file("/file"),
            box.read_file("/file", max_bytes=7),
            box.write_file("/file", b"content"),
            box.set_ttl(60),
            launcher.wait_for_exit(box, 1),
            capture_diff(box, "/w", 1000, 30),
        ):
            with pytest.raises(SandboxBusyError):
                await call


async def test_a_connection_that_is_cut_while_the_command_runs(daemon: DockerDaemonStandin, box: DockerSandbox) -> None:
    daemon.played = RecordedExec([(1, b"begun\n")], {"Running": True, "ExitCode": None})
    with pytest.raises(SandboxBusyError, match="cut"):
        await box.exec("anything", timeout=None)


async def test_a_daemon_that_has_lost_the_exit_code_is_busy(daemon: DockerDaemonStandin, box: DockerSandbox) -> None:
    daemon.played = RecordedExec([(1, b"begun\n")], {"Running": False, "ExitCode": None})
    with pytest.raises(SandboxBusyError):
        await box.exec("anything", check=False)


async def test_a_command_that_is_killed_at_its_time_limit_has_its_output(
    daemon: DockerDaemonStandin, box: DockerSandbox
) -> None:
    daemon.played = recorded(b"begun\n", exit_code=137)
    with pytest.raises(CommandFailedError) as failed:
        await box.exec("anything", timeout=0.001)
    assert failed.value.timed_out and (failed.value.stdout, failed.value.stderr) == ("begun\n", "")


async def test_a_command_that_kills_the_framing_shell_has_failed(
    daemon: DockerDaemonStandin, box: DockerSandbox
) -> None:
    """A repeated call would fail, too."""
    daemon.played = RecordedExec([(1, b"begun\n")], {"Running": False, "ExitCode": 137})
    result = await box.exec("anything", check=False, timeout=None)
    assert (result.exit_code, result.stdout) == (137, "begun\n")


async def test_a_child_that_holds_the_streams_does_not_hold_the_call(
    daemon: DockerDaemonStandin, box: DockerSandbox
) -> None:
    daemon.played = recorded(b"started\n", stays_open=True)
    async with asyncio.timeout(60):
        assert (await box.exec("anything", timeout=None)).stdout == "started\n"


@pytest.mark.parametrize("wrong", [{}, [], {"Id": 7, "State": None}, {"Running": False, "ProcessConfig": {}}])
@pytest.mark.parametrize("address", ["exec", "json"])
async def test_an_answer_that_cannot_be_read_is_busy(
    daemon: DockerDaemonStandin, box: DockerSandbox, address: str, wrong: object
) -> None:
    daemon.played = RecordedExec([])  # only without an end mark is the daemon asked how the command ended
    daemon.answers = {address: wrong}
    with pytest.raises(SandboxBusyError):
        await box.exec("anything", timeout=None)
    provider = DockerProvider(daemon.url)
    with pytest.raises(SandboxBusyError):
        await provider.connect("C1") if address == "json" else await box.read_file("/etc/passwd")
    await provider.close()


async def test_a_call_without_end_is_busy(
    daemon: DockerDaemonStandin, box: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_box, "_TRANSFER_SECONDS", 0.2)
    monkeypatch.setattr(docker_box, "_ENDING_SECONDS", 0.2)
    daemon.played = RecordedExec([(1, b"begun\n")], {"Running": True, "ExitCode": None}, stays_open=True)
    async with asyncio.timeout(60):
        for call in (
            box.write_file("/tmp/x", b"abc"),
            box.read_file("/tmp/x"),
            box.exec("anything", timeout=0.1),
            box.set_ttl(60),
        ):
            with pytest.raises(SandboxBusyError, match="not done after"):
                await call


JSON = "application/json"
PROXY_PAGE = "<html><h1>404 Not Found</h1> no such container</html>"


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        ((404, JSON, '{"message": "No such container: C1"}'), SandboxGoneError),
        ((409, JSON, '{"message": "container C1 is not running"}'), SandboxGoneError),
        ((400, JSON, '{"message": "unable to find user nobody-here"}'), ConfigError),
        ((404, JSON, '{"message": "No such exec instance: E0"}'), SandboxBusyError),
        ((404, JSON, '{"message": "page not found"}'), SandboxBusyError),
        ((404, "text/html", PROXY_PAGE), SandboxBusyError),
        ((403, "text/html", PROXY_PAGE), SandboxBusyError),
        ((400, "text/plain", PROXY_PAGE), SandboxBusyError),
        ((404, JSON, "not JSON"), SandboxBusyError),
        ((500, JSON, "{}"), SandboxBusyError),
        ((500, JSON, '{"message": "out of disk"}'), SandboxBusyError),
        ((200, "text/html", PROXY_PAGE), SandboxBusyError),
    ],
)
async def test_only_a_refusal_that_is_recognised_is_final(
    daemon: DockerDaemonStandin, refusal: tuple[int, str, str], error: type[Exception]
) -> None:
    daemon.refusal = refusal
    provider = DockerProvider(daemon.url)
    with pytest.raises(error):
        await provider.connect("C1")
    if error is SandboxBusyError:
        with pytest.raises(error):
            await provider.list({})
    await provider.close()
