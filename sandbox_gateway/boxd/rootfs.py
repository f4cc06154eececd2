"""Assemble the file tree of one box at /tmp of boxd's private mount namespace.

The tree is built from fds before any namespace is entered, so the box needs no read permission on the host directories
above it (a 0700 home, a test's temporary folder).
"""

import errno
import fcntl
import os
import stat

from sandbox_gateway.boxd import box_disk, linux_calls
from sandbox_gateway.boxd.protocol import BoxFaultError, BoxSpec

STAGE = "/tmp"
_DISK = "disk"
_ROOT, _LOWER, _UPPER, _WORK = "root", "lower", "upper", "work"


def assemble(spec: BoxSpec, user_ns: int) -> None:
    """Assemble the box's root at STAGE. Sources are opened first, because STAGE hides the content of /tmp."""
    sources = [(linux_calls.clone_tree(source, idmap_user_ns=user_ns), target) for source, target in spec.binds]
    linux_calls.unshare(linux_calls.CLONE_NEWNS)
    linux_calls.make_mounts_private()
    if spec.disk_template:
        os.mkdir(_DISK, 0o755)
        box_disk.mount_copy(spec.disk_template, _DISK)
        os.chdir(_DISK)
    if spec.lower is not None:
        _hold_image(spec.lower)
        make_layers(spec.uid_base)
        linux_calls.attach_tree(linux_calls.clone_tree(spec.lower, idmap_user_ns=user_ns), _LOWER, read_only=True)
    if spec.lower is None or spec.copies_image:
        _stage_directory(spec)
    else:
        mount_overlay(spec.shares_ids)
    _make_owned(STAGE, spec)
    for tree, target in sources:
        mount_point = STAGE + target
        _make_mount_point(mount_point, tree, spec.uid_base)
        linux_calls.attach_tree(tree, mount_point, read_only=True)
    if spec.disk_template:
        os.chdir("..")


def _stage_directory(spec: BoxSpec) -> None:
    os.mkdir(_ROOT, 0o755)
    if spec.lower is not None:
        _copy_tree(_LOWER, _ROOT)
        if not spec.shares_ids and os.stat(_ROOT).st_uid == os.stat(spec.lower).st_uid:  # the image is not idmapped
            _shift_owners(_ROOT, spec.uid_base)
    linux_calls.attach_tree(linux_calls.clone_tree(_ROOT, idmap_user_ns=None), STAGE, read_only=False)


def _copy_tree(source: str, target: str) -> None:
    """Copy a tree with its owners, modes, times and hard links. Blocks are shared if the file system can (reflink)."""
    from subprocess import PIPE, run

    done = run(["cp", "-a", "--reflink=auto", f"{source}/.", target], stderr=PIPE, text=True, check=False)
    if done.returncode != 0:
        is_full = any(os.strerror(number) in done.stderr for number in (errno.ENOSPC, errno.EDQUOT))
        size = run(["du", "-sm", source], stdout=PIPE, text=True, check=False).stdout.partition("\t")[0]
        raise BoxFaultError(
            "unavailable" if is_full else "internal",
            f"the image, {size} MiB, cannot be copied to {os.getcwd()}: {done.stderr.strip()[:400]}",
        )


def _shift_owners(tree: str, first_id: int) -> None:
    """Change the owners of a tree as an idmapped mount would, from 0 and up to `first_id` and up."""
    os.lchown(tree, first_id + os.stat(tree).st_uid, first_id + os.stat(tree).st_gid)
    for directory, names, files in os.walk(tree):
        for path in (os.path.join(directory, name) for name in names + files):
            found = os.lstat(path)
            if found.st_uid < first_id:  # else another link to the file came before
                os.lchown(path, first_id + found.st_uid, first_id + found.st_gid)
                if found.st_mode & (stat.S_ISUID | stat.S_ISGID):  # which lchown clears
                    os.chmod(path, stat.S_IMODE(found.st_mode))


def make_layers(owner: int) -> None:
    """Make the directories of an overlay in the working directory."""
    for name in (_LOWER, _UPPER, _WORK):
        os.mkdir(name, 0o755)
    os.chown(_UPPER, owner, owner)


def mount_overlay(shares_ids: bool) -> None:
    """Mount the layers of the working directory at STAGE. Raises OSError if overlays cannot be mounted here."""
    options = f"lowerdir={_LOWER},upperdir={_UPPER},workdir={_WORK}"
    # Root of a user namespace may only write `user.` attributes, which exclude metacopy.
    attributes = ",userxattr" if shares_ids else ",metacopy=on"
    # volatile: no data of a box must survive a crash of the machine
    for extra in (f"{attributes},volatile", attributes, ""):
        try:
            linux_calls.mount_overlay(STAGE, options + extra)
            break
        except OSError:
            if not extra:
                raise


def _hold_image(lower: str) -> None:
    """Hold a shared lock on the image's facts while this process lives, so that its removal sees the use."""
    facts = os.open(f"{os.path.dirname(lower)}/meta.json", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(facts, fcntl.LOCK_SH | fcntl.LOCK_NB)


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
