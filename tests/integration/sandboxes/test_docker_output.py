"""The end mark is written by any shell behind each stream of a command. The shells run in a box."""

import shlex

import pytest

from sandboxes.base import Sandbox
from sandboxes.docker_output import MARK_VARIABLE, MarkedStream, framed, new_mark

pytestmark = pytest.mark.timeout(300)
SHELLS = ["dash", "bash", "bash --posix", "busybox sh", "ksh", "zsh"]
_FULL_PIPE = """
import fcntl, os, subprocess, sys, time
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True: os.write(writer, b"x" * 4096)
except BlockingIOError: pass
running = subprocess.Popen(sys.argv[1:], stdout=writer)
os.close(writer)
time.sleep(0.5)  # the shell finds the pipe full
sys.stdout.write(os.fdopen(reader, "rb").read().decode().lstrip("x"))
"""


async def require(box: Sandbox, shell: str) -> None:
    if (await box.exec(f"command -v {shell.split()[0]}", check=False)).exit_code != 0:
        pytest.skip(f"this machine has no {shell}")


def command_line(shell: str, command: list[str], mark: str) -> str:
    words = ["env", f"{MARK_VARIABLE}={mark}", *shell.split(), *framed(command)[1:]]
    return shlex.join(words)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("script", "exit_code", "stdout", "stderr"),
    [
        ("echo out; echo err >&2; exit 3", 3, b"out\n", b"err\n"),
        ("printf '\\0\\377'; printf no-newline >&2", 0, b"\0\xff", b"no-newline"),
        ("echo begun; kill -9 $$", 137, b"begun\n", b""),
        ("echo begun; kill -TERM 0; sleep 5", 143, b"begun\n", b""),
        ("exec >&- 2>&-", 0, b"", b""),
        ("trap -p PIPE TERM; env | grep -c END_MARK; [ ! -e /proc/self/fd/3 ]", 0, b"0\n", b""),
        ("sleep 100 & echo started", 0, b"started\n", b""),
        ("timeout -s KILL 0.3 bash -c 'echo begun; sleep 60'", 137, b"begun\n", b""),
        ("cat", 0, b"input", b""),
    ],
)
async def test_a_shell_frames_what_a_command_prints(
    box: Sandbox, shell: str, script: str, exit_code: int, stdout: bytes, stderr: bytes
) -> None:
    await require(box, shell)
    mark = new_mark()
    command = command_line(shell, ["bash", "-c", script], mark)
    result = await box.exec(f"printf input | setsid -w {command} > /tmp/out 2> /tmp/err", check=False)
    assert result.exit_code == 0
    for path, expected in (("/tmp/out", stdout), ("/tmp/err", stderr)):
        stream = MarkedStream(mark)
        assert (stream.feed(await box.read_file(path)), stream.exit_code) == (expected, exit_code)


@pytest.mark.parametrize("shell", SHELLS)
async def test_a_missing_program_is_named(box: Sandbox, shell: str) -> None:
    await require(box, shell)
    mark = new_mark()
    stream = MarkedStream(mark)
    printed = await box.exec(command_line(shell, ["no-such-program"], mark))
    assert b"no-such-program" in stream.feed(printed.stderr.encode())
    assert stream.exit_code == 127


@pytest.mark.parametrize("shell", SHELLS)
async def test_a_full_pipe_that_does_not_block_gets_its_mark(box: Sandbox, shell: str) -> None:
    """Some programs leave their output so. The mark would be lost, and every try would be busy."""
    await require(box, shell)
    mark = new_mark()
    command = command_line(shell, ["true"], mark)
    printed = await box.exec(f"/opt/ratchet/bin/python3 -c {shlex.quote(_FULL_PIPE)} {command}")
    stream = MarkedStream(mark)
    assert (stream.feed(printed.stdout.encode()), stream.exit_code) == (b"", 0)
