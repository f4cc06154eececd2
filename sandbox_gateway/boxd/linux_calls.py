"""Linux calls that Python's library lacks, as typed functions: all ctypes calls and magic numbers of the sandbox."""

import contextlib
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_MS_REC_PRIVATE = 0x4000 | 0x40000
_MS_NOSUID, _MS_NODEV, _MS_NOATIME = 2, 4, 1024
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096
_KEPT_FLAGS = _MS_NOSUID | _MS_NODEV | 8  # MS_NOEXEC; the kernel refuses to take them away
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442  # the same numbers on every architecture
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 0x1
_MOUNT_ATTR_IDMAP = 0x100000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_LAST_CAP = 40

# Docker's default set without NET_RAW: sufficient for package installers, without effect outside the box. chown,
# dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot, mknod, audit_write,
# setfcap
_KEPT_CAPS = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 27, 29, 31})

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def within(namespace: int, kind: int, work: Callable[[], _T]) -> _T:
    """Do `work` in a thread that joins a namespace and ends then: only the machine's root could leave it again. In a
    pid namespace, the children that the thread forks are inside, and not this process."""
    results: list[_T] = []
    errors: list[Exception] = []

    def join_and_work() -> None:
        try:
            setns(namespace, kind)
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=join_and_work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def make_mounts_private() -> None:
    _check(_libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None), "make / private")


def clone_tree(source: str, idmap_user_ns: int | None) -> int:
    """Return an fd of a detached copy of the mount tree at `source`; with a user namespace fd, owners are mapped into
    it.

    A file system that cannot map owners (for example overlay under a container) is used unmapped: its files then
    belong to the user `nobody` in the box, which can read them as before.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    fd = _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), flags), f"open_tree {source}")
    if idmap_user_ns is not None:
        with contextlib.suppress(OSError):
            _set_attributes(fd, _MOUNT_ATTR_IDMAP, idmap_user_ns)
    return fd


def _set_attributes(fd: int, attributes: int, user_ns: int) -> None:
    packed = struct.pack("QQQQ", attributes, 0, 0, user_ns)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    _check(_libc.syscall(_SYS_MOUNT_SETATTR, fd, b"", flags, packed, len(packed)), "mount_setattr")


def attach_tree(fd: int, target: str, *, read_only: bool) -> None:
    """Mount the result of `clone_tree` at `target` and close the fd."""
    remounts = False
    try:
        if read_only:
            try:
                _set_attributes(fd, _MOUNT_ATTR_RDONLY, 0)
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                remounts = True  # before Linux 5.12
        _check(
            _libc.syscall(_SYS_MOVE_MOUNT, fd, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH),
            f"move_mount {target}",
        )
    finally:
        os.close(fd)
    if remounts:
        _remount_read_only(os.fsencode(os.path.realpath(target)))


def _remount_read_only(top: bytes) -> None:
    """Make the mount at `top` and those below it read-only."""
    with open("/proc/self/mountinfo", "rb") as mounts:
        points = [line.split()[4].decode("unicode_escape").encode("latin-1") for line in mounts]
    for point in points:
        if point == top or point.startswith(top + b"/"):
            flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | os.statvfs(point).f_flag & _KEPT_FLAGS
            _check(_libc.mount(None, point, None, flags, None), f"read-only mount at {os.fsdecode(point)}")


def mount_overlay(target: str, options: str) -> None:
    _check(_libc.mount(b"overlay", os.fsencode(target), b"overlay", 0, os.fsencode(options)), f"overlay at {target}")


def mount_file_system(device: str, target: str, kind: str, options: str) -> None:
    """Mount a block device at `target` with nodev, nosuid and noatime."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOATIME
    _check(
        _libc.mount(os.fsencode(device), os.fsencode(target), kind.encode(), flags, options.encode()),
        f"{kind} at {target}",
    )


def die_with_parent(signal_number: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def make_undumpable() -> None:
    """Prevent box processes of the same uid from reading this one through /proc or ptrace."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_capabilities() -> None:
    """Remove all but the kept capabilities from the bounding set: the next exec loses them permanently."""
    for capability in range(_LAST_CAP + 1):
        if capability not in _KEPT_CAPS:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def forbid_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
