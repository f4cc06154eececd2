"""Faults in one part of a running stack: `kill -9`, a suspension, a time without the part; waiting until it is back."""

import contextlib
import os
import signal
import time
from collections.abc import Callable

import psutil

from stack.parts import Stack
from stack.supervisor import Supervisor

PARTS = ("worker", "adapter", "engine", "learner", "gateway", "temporal")


def wait_until(condition: Callable[[], bool], what: str, timeout_seconds: float = 480) -> None:
    """Poll `condition`. Raises AssertionError with `what` after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {timeout_seconds:.0f} s waiting until {what}"
        time.sleep(0.5)


class Faults:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.supervisor = Supervisor(stack)
        self.killed: list[tuple[str, int]] = []

    def _supervised_pid(self, part: str) -> int | None:
        return next(
            (state.pid for state in self.supervisor.states() if state.name == part and state.state == "running"), None
        )

    def victim(self, part: str) -> int | None:
        """Return the process that does the part's work: vLLM itself for the engine, a rank for the learner, else the
        part's own.
        """
        pid = self._supervised_pid(part)
        if pid is None:
            return None
        if part == "engine":
            return next((child.pid for child in _children(pid) if _is_engine(child)), None)
        if part == "learner":
            return _rank_pid(self.stack)
        return pid

    def kill(self, part: str) -> None:
        """Send SIGKILL to the part's victim once it exists; return when that process is gone and another one does its
        work.
        """
        wait_until(lambda: self.victim(part) is not None, f"{part} runs")
        pid = self.victim(part)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.killed.append((part, pid))
        wait_until(lambda: self.victim(part) not in (None, pid), f"{part} is back after kill -9 of {pid}")

    def send(self, part: str, number: signal.Signals) -> int:
        """Send a signal to the part's victim once it exists, and return the victim's pid."""
        wait_until(lambda: self.victim(part) is not None, f"{part} runs")
        pid = self.victim(part)
        assert pid is not None
        os.kill(pid, number)
        return pid

    def suspend(self, part: str, seconds: float) -> None:
        """Suspend the part's victim for this long."""
        pid = self.send(part, signal.SIGSTOP)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):  # the watcher was faster
            os.kill(pid, signal.SIGCONT)

    def freeze(self, part: str) -> None:
        """Suspend the part's victim until another process does its work; it is never continued."""
        pid = self.send(part, signal.SIGSTOP)
        wait_until(lambda: self.victim(part) not in (None, pid), f"{part} is back after SIGSTOP of {pid}")

    def hold_down(self, part: str, seconds: float) -> None:
        """Kill the part and keep it down for this long."""
        self.send(part, signal.SIGKILL)
        self.supervisor.stop(part)
        time.sleep(seconds)
        self.supervisor.start(part)


def _children(pid: int) -> list[psutil.Process]:
    """Return living children; a process that ends during the scan is skipped."""
    try:
        return [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return []


def _is_engine(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return "vllm" in command or "seeded_engine" in command


def _rank_pid(stack: Stack) -> int | None:
    """Return the pid of a rank of this stack's learner. Ray starts it, so it is found by its title and the stack's
    mark.
    """
    for process in psutil.process_iter():
        try:
            if "RayTrainWorker" in " ".join(process.cmdline()) and process.environ().get("RATCHET_STACK") == str(
                stack.home
            ):
                return int(process.pid)
        except psutil.Error:
            continue
    return None
