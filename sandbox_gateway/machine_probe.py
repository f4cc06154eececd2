"""Check what this machine supports for boxes, as boxd needs it; `ratchet doctor` prints the result."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ratchet import paths
from ratchet.errors import MachineError
from sandbox_gateway import disk_template
from sandbox_gateway.boxd import cgroups, seccomp
from sandbox_gateway.boxd.id_modes import id_mode
from sandbox_gateway.fork_client import remove_tree

_TRIED_MEMORY_BYTES, _TRIED_PROCESSES = 64 << 20, 16
_NEW_USER_NAMESPACE = (
    "from sandbox_gateway.boxd import id_modes, linux_calls, seccomp; "
    "id_modes.enter_own_namespaces(id_modes.id_mode()); "
    "linux_calls.unshare(linux_calls.CLONE_NEWUSER | linux_calls.CLONE_NEWNS); linux_calls.make_mounts_private()"
)
_NEW_OVERLAY = (
    "import os; from sandbox_gateway.boxd import id_modes, linux_calls, rootfs; mode = id_modes.id_mode(); "
    "id_modes.enter_own_namespaces(mode); linux_calls.unshare(linux_calls.CLONE_NEWNS); "
    "linux_calls.make_mounts_private(); os.chdir({directory!r}); "
    "rootfs.make_layers(mode.first_id or 0); rootfs.mount_overlay(mode.first_id is not None)"
)
_WITHOUT_LIMITS = (
    "each process has the memory limit of the box, each user the one of processes, and boxd kills what exceeds them in "
    "sum, twice a second; for an ordinary user start the stack by `systemd-run --user --scope -p Delegate=yes`"
)
_INSTALL = "install it with the system's package manager (package `bubblewrap`)"
NEEDED = ("bubblewrap", "user namespaces")
"""The protections without which no box starts."""


@dataclass(frozen=True, slots=True)
class Protection:
    """One line of the report: `on` tells whether boxes have this protection here, `reason` why or why not."""

    name: str
    on: bool
    reason: str


def probe_machine() -> list[Protection]:
    return [_bubblewrap(), _user_namespaces(), _ids(), _limits(), _disk(), shared_images(), _system_calls(), _network()]


def require_sandbox_support() -> None:
    """Raise MachineError with one sentence of cause and remedy if boxes cannot run on this machine."""
    for protection in (_bubblewrap(), _user_namespaces()):
        if not protection.on:
            raise MachineError(f"Local sandboxes cannot run here: {protection.reason}.")


def find_bubblewrap() -> str | None:
    return shutil.which("bwrap")


def _bubblewrap() -> Protection:
    path = find_bubblewrap()
    reason = f"found at {path}" if path else f"`bwrap` is not on PATH; {_INSTALL}"
    return Protection("bubblewrap", path is not None, reason)


def _ids() -> Protection:
    mode = id_mode()
    return Protection("ids and limits of a box", not mode.lacks, f"the gateway runs as {mode.words}")


def _user_namespaces() -> Protection:
    name = "user namespaces"
    limit = Path("/proc/sys/user/max_user_namespaces")
    if limit.exists() and limit.read_text().strip() == "0":
        return Protection(name, False, "user namespaces are off; run `sysctl -w user.max_user_namespaces=65536`")
    if not limit.exists() and not Path("/proc/self/ns/user").exists():
        return Protection(name, False, "this kernel has no user namespaces; boot one that has CONFIG_USER_NS")
    if not _succeeds_in_child(_NEW_USER_NAMESPACE):
        remedy = "run a container with CAP_SYS_ADMIN and without a seccomp profile"
        if os.geteuid() != 0:
            remedy += "; elsewhere see the sysctls `kernel.apparmor_restrict_unprivileged_userns` (0) and "
            remedy += "`kernel.unprivileged_userns_clone` (1)"
        return Protection(name, False, f"user namespaces are forbidden to this user; {remedy}")
    return Protection(name, True, "processes of a box hold no right outside it")


def _succeeds_in_child(code: str) -> bool:
    """Run code in a new interpreter, because configuration files do not show what a container's seccomp profile
    refuses.

    A forked child would not do: libraries start threads in it (OpenTelemetry does), and with a second thread the kernel
    refuses a user namespace.
    """
    command = [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # this user may not run the interpreter
        return False


def _limits() -> Protection:
    """Try the limits: a container may show control groups whose limits have no effect."""
    name, version = "memory and process limits", cgroups.usable_version()
    parent = cgroups.name_of(f"ratchet-probe-{os.getpid()}")
    if version == 0:
        return Protection(name, False, f"{cgroups.why_unusable()}; {_WITHOUT_LIMITS}")
    group = cgroups.cgroup_at(f"{parent}/box")
    try:
        cgroups.prepare_parent(parent, moves_processes=False)
        group.create(_TRIED_MEMORY_BYTES, _TRIED_PROCESSES)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return Protection(name, True, f"control groups of {os.path.dirname(parent)}, as soon as the gateway runs")
        reason = f"control groups version {version} refuse limits ({error}); {_WITHOUT_LIMITS}"
        return Protection(name, False, reason)
    finally:
        group.remove()
        cgroups.remove_parent(parent)
    return Protection(name, True, f"control groups version {version}")


def _disk() -> Protection:
    name = "disk limit"
    if disk_template.is_possible():
        return Protection(name, True, "each box has a disk of its own, a sparse file with ext4 in it")
    reason = (
        "`mkfs.ext4` is not on PATH (package `e2fsprogs`)"
        if shutil.which("mkfs.ext4") is None
        else "this user has no loop devices here"
    )
    return Protection(name, False, f"{reason}; boxes share the disk of the gateway's directory")


def shared_images() -> Protection:
    name, directory = "shared images", (paths.home() / "boxes").resolve()
    if disk_template.is_possible():
        return Protection(name, True, "each box sees its image under an overlay on its own disk")
    while not directory.is_dir():
        directory = directory.parent
    if has_overlays(directory):
        return Protection(name, True, "each box sees its image under an overlay")
    cost = "each box first copies its whole image, in time and space (little on btrfs and xfs, which share blocks)"
    return Protection(name, False, f"overlays cannot be mounted in {directory}; {cost}")


def has_overlays(directory: Path) -> bool:
    """Try an overlay in a directory, as boxd mounts it: some kernels refuse it to users, and some file systems."""
    try:
        tried = Path(tempfile.mkdtemp(prefix="overlay-", dir=directory))
    except OSError:
        return False
    try:
        return _succeeds_in_child(_NEW_OVERLAY.format(directory=str(tried)))
    finally:
        remove_tree(tried)


def _system_calls() -> Protection:
    name, machine = "system call filter", os.uname().machine
    if not seccomp.PROGRAM:
        return Protection(name, False, f"there is no table of system calls for {machine}")
    if not _succeeds_in_child(f"{_NEW_USER_NAMESPACE}; seccomp.apply()"):
        return Protection(name, False, "seccomp filters are refused, or no interpreter can be started to try one")
    refused = "mounts, namespaces, modules, BPF, io_uring, keys, clocks and rare socket families are refused"
    return Protection(name, True, refused)


def _network() -> Protection:
    name = "closed network"
    if not Path("/proc/self/ns/net").exists():
        return Protection(name, False, "this kernel has no network namespaces")
    return Protection(name, True, "boxes reach only the gateway's egress ports")
