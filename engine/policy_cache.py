"""Copies of policy versions on this machine, fetched from their address.

A version's copy lies where the learner would have written it, so everything that reads weights finds it there, and the
relative path from an adapter to its base holds. Processes share the copies:

| file below the root       | meaning                                                                    |
|---------------------------|----------------------------------------------------------------------------|
| RUN/STEP.eEPOCH/          | the version; complete, because it appears by a rename after all digests     |
| RUN/STEP.eEPOCH.fetching/ | files and deltas that are checked, and NAME.part, which a later try goes on with |
| RUN/STEP.eEPOCH.lock      | it was fetched. Exclusive lock: it is fetched or deleted now; shared: in use |

A directory without a lock file was written here by the learner or lies on a shared path. It is used, and never deleted
from here. A lock ends with its process, also if that is killed.
"""

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from engine import weight_deltas, weight_storage
from engine.policy_files import file_sha256, fsync, is_address, policy_directory
from engine.weight_storage import DamagedVersionError
from ratchet.types import JsonObject

KEPT_VERSIONS = 3
"""Fetched versions of a run that stay on a machine: one that is loaded while a newer one is fetched, and the base of
both if they are adapters. A process holds as many of each of its runs."""
UNUSED_SECONDS = 3600.0
"""Age of the last use after which the versions of a run that no process holds are deleted. An engine that is restarted
finds its versions, however many its neighbours on the machine have fetched meanwhile."""


_LOOK_SECONDS = 0.05
"""Pause between two looks at a version that another process copies."""


class PolicyCache:
    """The versions that this process uses. Its methods block; several threads may call them."""

    def __init__(self, root: Path, num_kept: int = KEPT_VERSIONS) -> None:
        """`root`: the directory of all policies on this machine. `num_kept`: versions that this process holds; an
        engine that several runs share needs KEPT_VERSIONS of each."""
        self.root = root
        self.num_kept = num_kept
        self._held: OrderedDict[Path, int] = OrderedDict()  # directory -> descriptor of its lock, last used at the end
        self._changing = threading.Lock()

    def fetch(self, uri: str, files: Sequence[JsonObject]) -> Path:
        """Return the directory of a version, after copying its files here if they are at an address.

        Until this process has used `num_kept` others, no process deletes it. Raises WeightStorageError; what
        was copied stays for the next try. Raises DamagedVersionError if a file is not as its row says.
        """
        directory = policy_directory(uri, self.root)
        if not is_address(uri):
            return directory
        lock = _lock_of(directory)
        while not (directory.is_dir() and not lock.exists()):
            descriptor = _locked(lock, fcntl.LOCK_SH)
            if directory.is_dir():
                self._hold(directory, descriptor)
                break
            os.close(descriptor)
            alone = _locked_alone(lock)
            if alone is None:  # another process has it: it copies, or has copied and uses the version for long
                time.sleep(_LOOK_SECONDS)
                continue
            try:
                if not directory.is_dir():
                    _copy_version(uri, files, directory)
            finally:
                os.close(alone)
        self._evict()
        return directory

    def __enter__(self) -> "PolicyCache":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changing:
            while self._held:
                os.close(self._held.popitem()[1])

    def discard(self, directory: Path) -> None:
        """Delete a fetched version whose files have changed on the disk, unless another process uses it."""
        with self._changing:
            if (descriptor := self._held.pop(directory, None)) is not None:
                os.close(descriptor)
        _delete(_lock_of(directory))

    def _hold(self, directory: Path, descriptor: int) -> None:
        os.utime(_lock_of(directory))
        with self._changing:
            surplus = [before] if (before := self._held.pop(directory, None)) is not None else []
            self._held[directory] = descriptor
            while len(self._held) > self.num_kept:
                surplus.append(self._held.popitem(last=False)[1])
        for one in surplus:
            os.close(one)

    def _evict(self) -> None:
        """Delete the fetched versions that no process holds, except the KEPT_VERSIONS of each run that were used last,
        as long as one of them was used in the last UNUSED_SECONDS."""
        runs: dict[Path, list[Path]] = {}
        for lock in sorted(self.root.glob("*/*.lock"), key=_time_of_use, reverse=True):
            runs.setdefault(lock.parent, []).append(lock)
        oldest = time.time() - UNUSED_SECONDS
        for locks in runs.values():
            num_kept = KEPT_VERSIONS if _time_of_use(locks[0]) > oldest else 0
            for lock in locks[num_kept:]:
                _delete(lock)


def _copy_version(uri: str, files: Sequence[JsonObject], directory: Path) -> None:
    building = directory.with_name(directory.name + ".fetching")
    with weight_storage.storage_errors(uri):  # of this machine's disk, too
        building.mkdir(parents=True, exist_ok=True)
        for file in files:  # not in a pool, whose threads Python waits for at its end; each file is read in many ranges
            if "chain" in file:
                _make_file(uri, file, building)
            else:
                _copy_file(f"{uri}/{file['name']}", file, building / file["name"])
        for path in set(building.iterdir()) - {building / file["name"] for file in files}:
            path.unlink()  # deltas, and what a killed try has left
        fsync(building)
        building.rename(directory)
        fsync(directory.parent)


def _make_file(uri: str, file: JsonObject, building: Path) -> None:
    """Make a file from the newest version of its chain that is on this machine, else from the whole one at the address.

    Raises DamagedVersionError if a delta has another digest, or the file that they make.
    """
    name, chain = file["name"], file["chain"]
    if (building / name).exists():  # an earlier try has checked it
        return
    address, root = uri.rsplit("/", 2)[0], building.parent.parent
    copies = [root / link["version"] / name for link in chain]
    here = [number for number, copy in enumerate(copies) if _has_size(copy, file["bytes"])]
    made = building / f"{name}.made"
    for start in (*here[-1:], None):
        if start is None:
            whole = building / f"{name}.whole"
            _copy_file(f"{address}/{chain[0]['version']}/{name}", chain[0], whole)
        else:
            whole = copies[start]
        deltas = []
        for number, link in enumerate(chain):
            if number > (start or 0) and link["bytes"]:
                deltas.append(building / f"{name}.{number}")
                _copy_file(f"{address}/{link['version']}/{name}{weight_deltas.SUFFIX}", link, deltas[-1])
        if (found := weight_deltas.apply_deltas(whole, deltas, made)) == file["sha256"]:
            fsync(made)
            made.rename(building / name)
            return
    for path in (whole, *deltas):  # they have changed on this disk since they were checked
        path.unlink()
    raise DamagedVersionError(f"{uri}/{name}: the deltas make a file of sha256 {found}, expected {file['sha256']}")


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except FileNotFoundError:
        return False


def _copy_file(uri: str, expected: JsonObject, copy: Path) -> None:
    """Copy a file, from where an earlier try stopped. `expected`: bytes and sha256, else DamagedVersionError."""
    if copy.exists():  # an earlier try has checked it
        return
    part = copy.with_name(f"{copy.name}.part")
    with part.open("ab") as file:
        if file.tell() > expected["bytes"]:
            file.truncate(0)
        for piece in weight_storage.read_file(uri, file.tell(), expected["bytes"]):
            file.write(piece)
    fsync(part)
    if (found := file_sha256(part)) != expected["sha256"]:
        part.unlink()
        raise DamagedVersionError(f"{uri} has sha256 {found}, expected {expected['sha256']}")
    part.rename(copy)


def _lock_of(directory: Path) -> Path:
    return directory.with_name(directory.name + ".lock")


def _locked(lock: Path, kind: int) -> int:
    """Return a descriptor of the lock file, locked; wait for it. The file is made if it does not exist."""
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, kind)
        if _is_at(lock, descriptor):
            return descriptor
        os.close(descriptor)  # deleted while this process waited


def _locked_alone(lock: Path) -> int | None:
    """Return a descriptor of the lock file, locked exclusively; None if another process has a lock."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(lock, descriptor):
            return descriptor
    os.close(descriptor)
    return None


def _delete(lock: Path) -> None:
    """Delete a fetched version with its lock file; if a process uses it, note that it is used now."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(lock, descriptor):
            directory, deleting = lock.with_suffix(""), lock.with_suffix(".deleting")
            shutil.rmtree(deleting, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                directory.rename(deleting)  # a directory of this name is always complete
            shutil.rmtree(deleting, ignore_errors=True)
            shutil.rmtree(lock.with_suffix(".fetching"), ignore_errors=True)
            lock.unlink()
    except BlockingIOError:
        os.utime(descriptor)  # so that it stays for a while if that process is restarted
    finally:
        os.close(descriptor)


def _is_at(lock: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(lock), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _time_of_use(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0
