"""A seccomp filter of system calls that no command in a box may make, modelled on Docker's default profile.

A box shares the host's kernel. Calls that an agent never needs (mounts, namespaces, modules, BPF, io_uring, keys) are
refused even if its capabilities would allow them. So are those that show which files the host has in memory, by which
one box could learn that another had run before it.
"""

import ctypes
import errno
import os
import socket
import struct

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS = 0, 4, 16
_X32_BIT = 0x40000000
# CLONE_NEWTIME … CLONE_NEWNET: every kind of namespace.
_NAMESPACE_FLAGS = 0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_NEW_NAMESPACE_OF_CLONE = _NAMESPACE_FLAGS & ~0xFF  # clone's lowest byte is the child's exit signal
_TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_SAME_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "quotactl_fd": 443,
    "cachestat": 451,
}  # fmt: skip
_REFUSED = {
    "x86_64": {
        "acct": 163, "add_key": 248, "adjtimex": 159, "bpf": 321, "clock_adjtime": 305, "clock_settime": 227,
        "create_module": 174, "delete_module": 176, "fanotify_init": 300, "finit_module": 313, "get_kernel_syms": 177,
        "init_module": 175, "ioperm": 173, "iopl": 172, "kexec_file_load": 320, "kexec_load": 246, "keyctl": 250,
        "lookup_dcookie": 212, "mount": 165, "move_pages": 279, "nfsservctl": 180, "open_by_handle_at": 304,
        "perf_event_open": 298, "pivot_root": 155, "query_module": 178, "quotactl": 179, "reboot": 169,
        "request_key": 249, "setns": 308, "settimeofday": 164, "swapoff": 168, "swapon": 167, "sysfs": 139,
        "syslog": 103, "umount2": 166, "unshare": 272, "uselib": 134, "userfaultfd": 323, "ustat": 136,
        "vhangup": 153, "mincore": 27, "preadv2": 327,
    },
    "aarch64": {
        "acct": 89, "add_key": 217, "adjtimex": 171, "bpf": 280, "clock_adjtime": 266, "clock_settime": 112,
        "delete_module": 106, "fanotify_init": 262, "finit_module": 273, "init_module": 105, "kexec_file_load": 294,
        "kexec_load": 104, "keyctl": 219, "lookup_dcookie": 18, "mount": 40, "move_pages": 239, "nfsservctl": 42,
        "open_by_handle_at": 265, "perf_event_open": 241, "pivot_root": 41, "quotactl": 60, "reboot": 142,
        "request_key": 218, "setns": 268, "settimeofday": 170, "swapoff": 225, "swapon": 224, "syslog": 116,
        "umount2": 39, "unshare": 97, "userfaultfd": 282, "vhangup": 58, "mincore": 232, "preadv2": 286,
    },
}  # fmt: skip
# (AUDIT_ARCH, clone, ioctl, socket, socketpair); clone3 is 435 everywhere.
_ARCHITECTURES = {"x86_64": (0xC000003E, 56, 16, 41, 53), "aarch64": (0xC00000B7, 220, 29, 198, 199)}
_CLONE3 = 435
# The families that the box's network namespace confines; others, such as AF_VSOCK, reach the host or its kernel's
# lesser known parts. The C library's name look-up needs AF_NETLINK.
_SOCKET_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _REFUSE | number)


def filter_program(machine: str) -> bytes:
    """Return the BPF program for this machine type; empty if we have no table for it."""
    if machine not in _ARCHITECTURES:
        return b""
    architecture, clone, ioctl, socket_call, socketpair_call = _ARCHITECTURES[machine]
    load_number = _step(_LOAD, _OFFSET_NUMBER)
    steps = [_step(_LOAD, _OFFSET_ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _refuse(errno.ENOSYS), load_number]
    if machine == "x86_64":
        steps += [_step(_AT_LEAST, _X32_BIT, 0, 1), _refuse(errno.ENOSYS)]
    # clone3's flags are behind a pointer that a filter cannot follow; without clone3 the C library falls back to
    # clone.
    steps += [_step(_EQUAL, _CLONE3, 0, 1), _refuse(errno.ENOSYS)]
    for number in sorted((_SAME_EVERYWHERE | _REFUSED[machine]).values()):
        steps += [_step(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    steps += [
        _step(_EQUAL, clone, 0, 3),
        _step(_LOAD, _OFFSET_ARGUMENTS),
        _step(_ANY_BIT, _NEW_NAMESPACE_OF_CLONE, 0, 1),
    ]
    steps += [_refuse(errno.EPERM), load_number, _step(_EQUAL, ioctl, 0, 4), _step(_LOAD, _OFFSET_ARGUMENTS + 8)]
    steps += [
        _step(_EQUAL, _TERMINAL_INJECTION[0], 1, 0),
        _step(_EQUAL, _TERMINAL_INJECTION[1], 0, 1),
        _refuse(errno.EPERM),
        load_number,
    ]
    return b"".join([*steps, *_only_listed_families(socket_call, socketpair_call), _step(_RETURN, _ALLOW)])


def _only_listed_families(socket_call: int, socketpair_call: int) -> list[bytes]:
    """Return steps that refuse a socket of another family. The kernel reads only the low half of the argument."""
    allowed = [_step(_EQUAL, family, len(_SOCKET_FAMILIES) - index) for index, family in enumerate(_SOCKET_FAMILIES)]
    check = [_step(_LOAD, _OFFSET_ARGUMENTS), *allowed, _refuse(errno.EAFNOSUPPORT)]
    return [_step(_EQUAL, socket_call, 1, 0), _step(_EQUAL, socketpair_call, 0, len(check)), *check]


PROGRAM = filter_program(os.uname().machine)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def apply() -> None:
    """Filter this process and its children permanently. Needs CAP_SYS_ADMIN in its user namespace. Raises OSError."""
    if not PROGRAM:
        return
    program = _FilterProgram(len(PROGRAM) // 8, PROGRAM)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
