"""Assemble the file tree of one box at /tmp of boxd's private mount namespace.

The tree is built from fds before any namespace is entered, so the box needs no read permission on the host directories
above it (a 0700 home, a test's temporary folder).
"""

import fcntl
import os

from sandbox_gateway.boxd import box_disk, linux_calls
from sandbox_gateway.boxd.protocol import BoxSpec

STAGE = "/tmp"
_DISK = "disk"
_ROOT, _LOWER, _UPPER, _WORK = "root", "lower", "upper", "work"


def assemble(spec: BoxSpec, user_ns: int) -> None:
    """Assemble the box's root at STAGE. Sources are opened first, because STAGE hides the content of /tmp."""
    sources = [
        (linux_calls.clone_tree(source, read_only=True, idmap_user_ns=user_ns), target) for source, target in spec.binds
    ]
    linux_calls.unshare(linux_calls.CLONE_NEWNS)
    linux_calls.make_mounts_private()
    if spec.disk_template:
        os.mkdir(_DISK, 0o755)
        box_disk.mount_copy(spec.disk_template, _DISK)
        os.chdir(_DISK)
    if spec.lower is None:
        _stage_plain(spec)
    else:
        _stage_overlay(spec, spec.lower, user_ns)
    for tree, target in sources:
        mount_point = STAGE + target
        _make_mount_point(mount_point, tree, spec.uid_base)
        linux_calls.attach_tree(tree, mount_point)
    if spec.disk_template:
        os.chdir("..")


def _stage_plain(spec: BoxSpec) -> None:
    _make_owned(_ROOT, spec)
    linux_calls.attach_tree(linux_calls.clone_tree(_ROOT, read_only=False, idmap_user_ns=None), STAGE)


def _stage_overlay(spec: BoxSpec, lower: str, user_ns: int) -> None:
    _hold_image(lower)
    for name in (_LOWER, _UPPER, _WORK):
        os.mkdir(name, 0o755)
    os.chown(_UPPER, spec.uid_base, spec.uid_base)
    linux_calls.attach_tree(linux_calls.clone_tree(lower, read_only=True, idmap_user_ns=user_ns), _LOWER)
    options = f"lowerdir={_LOWER},upperdir={_UPPER},workdir={_WORK}"
    # Root of a user namespace may only write `user.` attributes, which exclude metacopy.
    attributes = ",userxattr" if spec.shares_ids else ",metacopy=on"
    # volatile: no data of a box must survive a crash of the machine
    for extra in (f"{attributes},volatile", attributes, ""):
        try:
            linux_calls.mount_overlay(STAGE, options + extra)
            break
        except OSError:
            if not extra:
                raise
    _make_owned(STAGE, spec)


def _hold_image(lower: str) -> None:
    """Hold a shared lock on the image's tree while this process lives, so that its removal sees the use."""
    fcntl.flock(os.open(lower, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)


def _make_owned(root: str, spec: BoxSpec) -> None:
    for path, uid, mode in spec.owned_directories:
        full = root + path
        os.makedirs(full, exist_ok=True)
        os.chmod(full, mode)
        owner = spec.uid_base + (uid if spec.num_ids > 1 else 0)
        os.chown(full, owner, owner)
    for path, target in spec.links.items():
        if not os.path.lexists(root + path):
            os.symlink(target, root + path)


def _make_mount_point(path: str, tree: int, owner: int) -> None:
    if os.path.lexists(path):
        return
    if os.path.isdir(f"/proc/self/fd/{tree}"):
        os.makedirs(path, 0o755)
        os.chown(path, owner, owner)
    else:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
