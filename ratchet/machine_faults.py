"""Errors of the operating system whose cause is the machine itself, so that the same call may work later.

A missing file or right may be a mistake of this program, and an unknown host name one of the user.
"""

import errno
import os
import socket

_OF_THE_NETWORK = frozenset((
    errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE,
))  # fmt: skip
_WITHOUT_ROOM = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
)  # fmt: skip
_OF_THE_MACHINE = _OF_THE_NETWORK | {*_WITHOUT_ROOM, errno.EMFILE, errno.EBUSY, errno.ENODEV, errno.ENXIO}
"""Errors of a disk, a mount, a network or a machine without room."""
_WORDS_OF_RUNTIMES = (
    "MemoryError", "Out of memory", "OutOfMemoryError", "can't start new thread", "unable to create native thread",
)  # fmt: skip


def is_machine_fault(error: OSError) -> bool:
    """Return whether the machine or its network is to blame, and no mistake of this program or the user."""
    if isinstance(error, socket.gaierror):  # its numbers are of another list
        return error.errno == socket.EAI_AGAIN
    return isinstance(error, ConnectionError) or error.errno in _OF_THE_MACHINE


def describe_refusal(error: OSError) -> str:
    """Return what the machine refuses, and why: the end of a sentence that begins with the machine."""
    reason = error.strerror or str(error) or type(error).__name__
    names = [repr(str(name)) for name in (error.filename, error.filename2) if name is not None]
    if isinstance(error, BrokenPipeError):
        return f"lost the reader of what it wrote: {reason}"
    is_network = isinstance(error, ConnectionError | socket.gaierror) or error.errno in _OF_THE_NETWORK
    if is_network and not names:
        return f"cannot reach another now: {reason}"
    return f"refuses {' and '.join(names) or 'a file'}: {reason}"


def told_refusal(log: str) -> str:
    """Return the message of the C library or a runtime for a full disk, no memory or the like that a log contains."""
    lower = log.lower()
    return next((text for text in (*map(os.strerror, _WITHOUT_ROOM), *_WORDS_OF_RUNTIMES) if text.lower() in lower), "")
