"""A box's own disk: a sparse file that contains a file system, so that a box cannot fill any disk but its own.

Overlay file systems have no quota and project quotas need a file system made for them; a loop device works everywhere.
The loop device detaches itself when the last mount namespace that uses it ends, so a crash leaves nothing to clean up.
"""

import errno
import fcntl
import os
import struct

from sandbox_gateway.boxd import linux_calls

LOOP_CONTROL = "/dev/loop-control"
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4
_TRIES = 50
# noinit_itable: no kernel thread zeroes inode tables, which are holes anyway. nobarrier: a box's fsync does not flush
# the host's disk.
_MOUNT_OPTIONS = "noinit_itable,nobarrier"
IMAGE = "disk.img"


def mount_copy(template: str, target: str) -> None:
    """Copy the template to IMAGE in the working directory and mount it at `target`."""
    image = _copy_sparse(template, IMAGE)
    device_fd, device = _attach(image)
    try:
        linux_calls.mount_file_system(device, target, "ext4", _MOUNT_OPTIONS)
    finally:
        os.close(device_fd)
        os.close(image)


def _copy_sparse(source_path: str, target_path: str) -> int:
    source = os.open(source_path, os.O_RDONLY | os.O_CLOEXEC)
    target = os.open(target_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        size, position = os.fstat(source).st_size, 0
        os.ftruncate(target, size)
        while (position := _next_data(source, position)) < size:
            end = os.lseek(source, position, os.SEEK_HOLE)
            while position < end:
                position += os.copy_file_range(source, target, end - position, position, position)
    finally:
        os.close(source)
    return target


def _next_data(fd: int, position: int) -> int:
    try:
        return os.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # only holes from here on
            return os.fstat(fd).st_size
        raise


def _attach(image: int) -> tuple[int, str]:
    """Attach a free loop device to the image; if another box takes it first, try again."""
    information = struct.pack("QQQQQIIII64s64s32sQQ", 0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, b"ratchet", b"", b"", 0, 0)
    for _ in range(_TRIES):
        control = os.open(LOOP_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
        finally:
            os.close(control)
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _LOOP_CONFIGURE, struct.pack("II", image, 0) + information + bytes(64))
            return fd, device
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EBUSY:
                raise
    raise OSError(errno.EBUSY, "no loop device is free")
