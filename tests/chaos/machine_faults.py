"""Faults that hit more than one part: lost boxes, a cut network, a full disk, everything killed, a batch job's end."""

import asyncio
import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from sandbox_gateway.box_client import RECORD_FILE, BoxClient, BoxRecord
from sandbox_gateway.box_fleet import cgroup_parent
from sandbox_gateway.boxd.protocol import BoxFaultError
from sandbox_gateway.wire_errors import BoxNotFoundError
from sandboxes.e2b import E2BProvider
from stack.parts import Stack
from stack.ports import has_mark
from tests.chaos.faults import wait_until

_NOTICE_SECONDS = 30.0
"""Time between SIGTERM and SIGKILL of a batch job, as SLURM's KillWait."""
_FILLER = "filler"


class MissingPrivilegeError(Exception):
    """This machine does not allow the fault; the message is the reason."""


# ---------------------------------------------------------------- boxes


def list_boxes(stack: Stack) -> dict[str, str]:
    """Return the boxes that the provider holds: its id → the ledger's uuid, empty for a box that has none."""
    environment = stack.environment()

    async def listed() -> dict[str, str]:
        provider = E2BProvider(*(environment[name] for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL")))
        try:
            return {box.id: box.metadata.get("ratchet_box", "") for box in await provider.list({})}
        finally:
            await provider.close()

    return asyncio.run(listed())


def box_process(stack: Stack, box_id: str) -> psutil.Process | None:
    """Return the process that holds a box; None if the box has ended."""
    directory = stack.home / "boxes" / "boxes" / box_id
    try:
        client = BoxClient(directory, BoxRecord.model_validate_json((directory / RECORD_FILE).read_bytes()))
        return psutil.Process(int(asyncio.run(client.control(timeout_seconds=5, op="ping"))["pid"]))
    except (OSError, BoxFaultError, BoxNotFoundError, psutil.NoSuchProcess):
        return None


def kill_boxes(stack: Stack, box_ids: list[str]) -> set[str]:
    """Kill these boxes and return those that were still there."""
    killed = set()
    for box_id in box_ids:
        process = box_process(stack, box_id)
        if process is not None:
            process.kill()
            killed.add(box_id)
    return killed


def suspend_box(stack: Stack, box_id: str, seconds: float) -> None:
    """Suspend the process that holds a box for this long."""
    process = box_process(stack, box_id)
    if process is not None:
        process.suspend()
        time.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def lose_share(stack: Stack, box_ids: list[str], share: float, rng: random.Random) -> set[str]:
    """Kill this share of the boxes, drawn at random, at least one."""
    chosen = rng.sample(sorted(box_ids), max(1, round(share * len(box_ids))))
    return kill_boxes(stack, chosen)


def wait_for_command(stack: Stack, command: str) -> None:
    """Wait until a process in a box of this stack runs exactly this command line."""
    parent = cgroup_parent(stack.home / "boxes")

    def runs() -> bool:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if " ".join(process.cmdline()) == command:
                    return parent in Path(f"/proc/{process.pid}/cgroup").read_text()
        return False

    deadline = time.monotonic() + 120
    while not runs():
        assert time.monotonic() < deadline, f"no box has run `{command}` within two minutes"
        time.sleep(0.02)


# ---------------------------------------------------------------- network and disk


@contextmanager
def port_rule(port: int, *action: str) -> Iterator[None]:
    """Apply a firewall rule to new and open connections to a local port. Raises MissingPrivilegeError."""
    rule = ["INPUT", "-i", "lo", "-p", "tcp", "--dport", str(port), "-j", *action]
    _run(["iptables", "-I", *rule])
    try:
        yield
    finally:
        _run(["iptables", "-D", *rule])


def cut_port(port: int, seconds: float) -> None:
    """Drop every packet to a local port for this long."""
    with port_rule(port, "DROP"):
        time.sleep(seconds)


def refuse_port(port: int, seconds: float) -> None:
    """Refuse connections to a local port for this long; open ones are reset."""
    with port_rule(port, "REJECT", "--reject-with", "tcp-reset"):
        time.sleep(seconds)


def make_disk(home: Path, image: Path, gibibytes: int) -> None:
    """Give the state directory a file system of its own. Raises MissingPrivilegeError."""
    image.parent.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(gibibytes << 30)
    _run(["mkfs.ext4", "-q", "-m", "0", str(image)])
    home.mkdir(parents=True, exist_ok=True)
    _run(["mount", "-o", "loop", str(image), str(home)])
    home.chmod(0o755)


def end_disk(home: Path, image: Path) -> None:
    """Undo `make_disk`."""
    subprocess.run(["umount", "--lazy", str(home)], check=False, capture_output=True)
    image.unlink(missing_ok=True)


def fill_disk(home: Path, seconds: float) -> None:
    """Leave no byte free on the state directory's own file system for this long. Raises MissingPrivilegeError."""
    if not home.is_mount():
        raise MissingPrivilegeError(f"{home} has no file system of its own")
    filler = home / _FILLER
    with filler.open("wb") as file:
        chunk = bytes(1 << 20)
        with contextlib.suppress(OSError):
            while True:
                file.write(chunk)
                file.flush()
    try:
        time.sleep(seconds)
    finally:
        filler.unlink()


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise MissingPrivilegeError(f"`{' '.join(command)}` failed: {reason}") from error


# ---------------------------------------------------------------- everything


def stack_processes(stack: Stack, with_boxes: bool) -> list[psutil.Process]:
    """Return the stack's supervisor and the processes that it has started; those that hold boxes only if asked.

    Boxes outlive their gateway and have an empty environment; they are asked for their process.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
        found.append(psutil.Process(int((stack.home / "supervisord.pid").read_text())))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if has_mark(process, stack.home):
                found.append(process)
    boxes = stack.home / "boxes" / "boxes"
    if with_boxes and boxes.is_dir():
        found += [process for path in boxes.iterdir() if (process := box_process(stack, path.name)) is not None]
    return found


def kill_everything(stack: Stack, with_boxes: bool) -> None:
    """Send SIGKILL to every process of the stack at once, also to its supervisor."""
    processes = stack_processes(stack, with_boxes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=30)


def end_job(stack: Stack) -> None:
    """End everything as a batch system does: SIGTERM to every process, boxes included, and SIGKILL after 30 s."""
    for process in stack_processes(stack, with_boxes=True):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
    time.sleep(_NOTICE_SECONDS)
    kill_everything(stack, with_boxes=True)
    wait_until(lambda: not stack_processes(stack, with_boxes=True), "every process has ended", 60)
