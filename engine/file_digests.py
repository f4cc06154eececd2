"""Digests of weight files, computed in a thread before an update, so that it pauses vLLM for the loading alone.

States of a check. Its caller gives it a name, and asks until it has ended. Several runs that share an engine may check
at once; their threads read one after the other.

| from     | to       | when                                                                                     |
|----------|----------|------------------------------------------------------------------------------------------|
| none     | checking | its name is asked for the first time: a thread begins                                    |
| checking | ended    | the thread has compared every digest, or has found the first that is wrong               |
| ended    | ended    | its name is asked for again; it is told the same, so workers need not end at one moment  |
| ended    | none     | ENDED_KEPT_SECONDS later, once another check begins                                      |

A published file is not changed. A digest is kept for the update that follows, with the size, inode and times of the
file that was read; a file that was changed all the same, or a digest that is DIGEST_KEPT_SECONDS old, is read again.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.policy_files import sha256_of

ENDED_KEPT_SECONDS = 60.0
DIGEST_KEPT_SECONDS = 600.0
_TICK_NS = 10**8
"""A change within a tick of a file's clock leaves its times as they are, so a younger file's digest is not kept."""


class FileDigests:
    """Digests of files by path. Safe to use from several threads; none waits for another's file."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[tuple[int, ...], str, float]] = {}

    def get(self, path: Path) -> str:
        """Return the hex SHA-256 of a file. Reads the file unless it is as it was at an earlier call."""
        with path.open("rb", buffering=0) as file:  # a network file system looks at its server when a file is opened
            signature = _signature(os.fstat(file.fileno()))
            kept = self._kept.get(path)
            if kept is not None and kept[0] == signature and time.monotonic() < kept[2]:
                return kept[1]
            digest = sha256_of(file)
        now = time.monotonic()
        kept_still = {one: found for one, found in list(self._kept.items()) if now < found[2]}
        if time.time_ns() - max(signature[-2:]) > _TICK_NS:
            kept_still[path] = signature, digest, now + DIGEST_KEPT_SECONDS
        self._kept = kept_still
        return digest


class BackgroundChecks:
    """Checks of files in threads, each asked for by its name until it has ended."""

    def __init__(self) -> None:
        self._checks: dict[str, _Check] = {}
        self._one_reads = threading.Lock()

    def ask(self, name: str, work: Callable[[], Any]) -> dict[str, Any]:
        """Begin `work` unless this check has begun. Return {"done", "error"}: whether it has ended, what it raised."""
        check = self._checks.get(name)
        if check is None:
            now = time.monotonic()
            self._checks = {one: other for one, other in self._checks.items() if now < other.kept_until}
            check = _Check(work, self._one_reads)
            check.thread.start()
            self._checks[name] = check
        return {"done": check.is_done, "error": check.error}


class _Check:
    def __init__(self, work: Callable[[], Any], one_reads: threading.Lock) -> None:
        self._work = work
        self._one_reads = one_reads
        self.is_done = False
        self.error: str | None = None
        self.kept_until = float("inf")
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with self._one_reads:
                self._work()
        except Exception as error:  # the caller is told
            self.error = str(error) or repr(error)
        self.kept_until = time.monotonic() + ENDED_KEPT_SECONDS
        self.is_done = True


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
