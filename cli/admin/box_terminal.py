"""Connect the user's terminal to one in a box.

Keys are sent as they are typed and output is written unchanged, so the local terminal is put into raw mode.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Iterator, Mapping

from ratchet.errors import MachineError, SandboxGoneError


async def run_terminal(environment: Mapping[str, str], sandbox_id: str, user: str) -> int:
    """Return the shell's exit code. Raises SandboxGoneError if the box does not exist any more."""
    from e2b import CommandExitException
    from e2b.exceptions import SandboxException
    from e2b.sandbox.commands.command_handle import PtySize

    from sandboxes.e2b import E2BProvider

    urls = (environment.get("E2B_API_URL"), environment.get("E2B_SANDBOX_URL"))
    provider = E2BProvider(environment["E2B_API_KEY"], *urls)

    def size() -> PtySize:
        columns, rows = shutil.get_terminal_size()
        return PtySize(rows=rows, cols=columns)

    def show(data: bytes) -> None:
        os.write(sys.stdout.fileno(), data)

    try:
        box = (await provider.connect(sandbox_id)).sdk
        terminal = await box.pty.create(size(), on_data=show, user=user, timeout=0)
    except SandboxException as error:
        raise SandboxGoneError(f"box {sandbox_id}: {error}") from error
    loop, keys = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    async def send_keys() -> None:
        while data := await keys.get():
            await box.pty.send_stdin(terminal.pid, data)

    async def resize() -> None:
        await box.pty.resize(terminal.pid, size())

    tasks = {asyncio.create_task(send_keys())}
    loop.add_reader(sys.stdin.fileno(), lambda: keys.put_nowait(os.read(sys.stdin.fileno(), 4096)))
    loop.add_signal_handler(signal.SIGWINCH, lambda: tasks.add(asyncio.create_task(resize())))
    try:
        with _raw_mode():
            return int((await terminal.wait()).exit_code)
    except CommandExitException as ended:
        return int(ended.exit_code)
    finally:
        loop.remove_reader(sys.stdin.fileno())
        for task in tasks:
            task.cancel()


def run_docker_terminal(sandbox_id: str, user: str) -> int:
    """Open the terminal with Docker's own CLI. Raises MachineError if the program `docker` is not installed."""
    program = shutil.which("docker")
    if program is None:
        raise MachineError("a terminal in a container needs the program `docker` (Debian: docker.io) on this machine")
    terminal = "-it" if sys.stdin.isatty() else "-i"
    return subprocess.run(
        [program, "exec", terminal, "--user", user, sandbox_id, "/bin/bash", "-l"], check=False
    ).returncode


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Put standard input into raw mode if it is a terminal; leave a pipe as it is."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setraw(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
