"""The ids that boxes can have: what the gateway's user may map, and what boxes lack with it.

Root maps ids for each box. Another user becomes root of a user and a mount namespace of its own first, in which
`newuidmap` maps its subordinate ids, or in which it is the only id. The fork server and every boxd are in such a one.
"""

import contextlib
import os
from dataclasses import dataclass, replace
from functools import cache

from sandbox_gateway.boxd import cgroups, linux_calls

NUM_IDS = 65_536
_NO_DISK_LIMIT = "a limit of a box's disk"
WITHOUT_CGROUPS = (
    "limits of memory and processes by the kernel (each process and user has them, and boxd looks at their sum)",
    "pause",
)
"""Lacking in boxes of any mode if the gateway has no control groups."""


@dataclass(frozen=True, slots=True)
class IdMode:
    """`num_ids`: of one box. `first_id`: of every box, as boxd sees it; None: each box has ids that no other has.
    `mappers`: the commands that map the ids, without the process."""

    name: str
    num_ids: int
    first_id: int | None
    lacks: tuple[str, ...] = ()
    mappers: tuple[tuple[str, ...], ...] = ()

    @property
    def words(self) -> str:
        return f"{self.name}; boxes lack {'; '.join(self.lacks)}" if self.lacks else self.name


MODES = (
    IdMode("root", NUM_IDS, None),
    IdMode(
        "an ordinary user with subordinate ids",
        NUM_IDS,
        1,
        ("ids that no other box has (namespaces alone keep boxes apart)", _NO_DISK_LIMIT),
    ),
    IdMode(
        "an ordinary user with one id",
        1,
        0,
        (
            "a second user, without which no agent starts and tests run only with `grading.user: root` (install "
            "`newuidmap`, package uidmap, and give the user 65536 ids: `usermod --add-subuids 100000-165535 "
            "--add-subgids 100000-165535 USER`)",
            _NO_DISK_LIMIT,
        ),
    ),
)
"""By falling rights."""
ROOT, SUBORDINATE_IDS, ONE_ID = MODES


@cache
def id_mode() -> IdMode:
    """Return the mode of this process's user on this machine."""
    mode = _mode_of_user()
    return mode if cgroups.usable_version() else replace(mode, lacks=(*mode.lacks, *WITHOUT_CGROUPS))


def _mode_of_user() -> IdMode:
    from shutil import which

    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        return ROOT
    mappers = []
    for program, own_id, file in (("newuidmap", uid, "/etc/subuid"), ("newgidmap", gid, "/etc/subgid")):
        path, first = which(program), _first_subordinate_id(file, uid)
        if path is None or first is None:
            return ONE_ID
        mappers.append((path, "0", str(own_id), "1", "1", first, str(NUM_IDS)))
    return replace(SUBORDINATE_IDS, mappers=tuple(mappers))


def _first_subordinate_id(file: str, uid: int) -> str | None:
    """Return the first id of a range of at least NUM_IDS that the file gives to the user."""
    from pwd import getpwuid

    owners = {str(uid)}
    with contextlib.suppress(KeyError):  # a user without an entry
        owners.add(getpwuid(uid).pw_name)
    try:
        with open(file) as lines:
            rows = [line.strip().split(":") for line in lines]
    except OSError:
        return None
    ranges = [row[1:] for row in rows if row[0] in owners and len(row) == 3 and all(map(str.isdigit, row[1:]))]
    return next((first for first, count in ranges if int(count) >= NUM_IDS), None)


def enter_own_namespaces(mode: IdMode) -> None:
    """Become root of a user and a mount namespace, if the user is not root. This process has one thread. Raises OSError
    if the machine refuses it."""
    if mode.first_id is None:
        return
    ready, entered = os.pipe()
    mapper = os.fork()  # outside of the new namespace, in which the mapping programs would have no rights
    if mapper == 0:
        _map_ids_of(os.getppid(), mode, ready, entered)
    os.close(ready)
    try:
        linux_calls.unshare(linux_calls.CLONE_NEWUSER | linux_calls.CLONE_NEWNS)
        os.write(entered, b"x")
    finally:
        os.close(entered)
        _, status = os.waitpid(mapper, 0)
    if status != 0:
        raise PermissionError(f"the ids of boxes cannot be mapped for {mode.name}")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _map_ids_of(process: int, mode: IdMode, ready: int, entered: int) -> None:
    """Run in the child; never returns."""
    failed = True
    try:
        os.close(entered)
        if os.read(ready, 1):
            for program, *ids in mode.mappers:
                if os.spawnv(os.P_WAIT, program, [program, str(process), *ids]) != 0:
                    return
            if not mode.mappers:
                _map_one_id(process)
            failed = False
    finally:
        os._exit(failed)


def _map_one_id(process: int) -> None:
    maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    for name, text in maps.items():
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)
