"""The namespaces of one box: created through bubblewrap, kept as fds, entered by every later child. The order in which
namespaces are joined matters and is written only here."""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from sandbox_gateway.boxd import linux_calls
from sandbox_gateway.boxd.cgroups import Cgroup
from sandbox_gateway.boxd.protocol import BoxFaultError, BoxSpec
from sandbox_gateway.boxd.rootfs import STAGE

_T = TypeVar("_T")
_KINDS = {
    "mnt": linux_calls.CLONE_NEWNS,
    "uts": linux_calls.CLONE_NEWUTS,
    "ipc": linux_calls.CLONE_NEWIPC,
    "net": linux_calls.CLONE_NEWNET,
    "cgroup": linux_calls.CLONE_NEWCGROUP,
    "pid": linux_calls.CLONE_NEWPID,
}
# bash instead of sh: as pid 1 it reaps orphans while it waits in `read`. No process in the box can kill pid 1; when
# boxd dies, pid 1's stdin closes and the box ends.
_PID_ONE = ("/bin/bash", "--noprofile", "--norc", "-c", "exec 2>/dev/null; echo r; read _")


@dataclass(slots=True)
class Namespaces:
    """`user` and `fds`: open namespace fds; `init_pid`: host pid of the box's pid 1, `bwrap_pid` of its parent."""

    user: int
    num_ids: int
    fds: dict[str, int]
    init_pid: int
    bwrap_pid: int
    keep_alive: int
    """Write end of pid 1's stdin."""

    def enter(self, kinds: Sequence[str]) -> None:
        """Join the user namespace, then `kinds`, permanently; call it in a freshly forked child."""
        linux_calls.setns(self.user, linux_calls.CLONE_NEWUSER)
        for kind in kinds:
            linux_calls.setns(self.fds[kind], _KINDS[kind])

    def within(self, kind: Literal["net", "pid"], work: Callable[[], _T]) -> _T:
        """Do `work` in a thread that is in one of the namespaces."""
        return linux_calls.within(self.fds[kind], _KINDS[kind], work)


ALL_KINDS = tuple(kind for kind in _KINDS if kind != "pid")


def make_user_namespace(first_id: int, num_ids: int) -> int:
    """Return an fd of a new user namespace in which 0 and up are the ids from `first_id` on that this process sees.
    bubblewrap itself maps only one id, so the box would have no second user."""
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(done_write)
            linux_calls.unshare(linux_calls.CLONE_NEWUSER)
            os.write(ready_write, b"x")
            os.read(done_read, 1)
        finally:
            os._exit(0)
    os.close(ready_write)
    try:
        if not os.read(ready_read, 1):
            raise BoxFaultError("internal", "this machine refuses user namespaces")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w") as mapping:
                mapping.write(f"0 {first_id} {num_ids}")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (ready_read, done_read, done_write):
            os.close(fd)
        os.waitpid(child, 0)


def change_user(num_ids: int, uid: int = 0, gid: int = 0, groups: Sequence[int] = ()) -> None:
    """Become the box's root or another user. If the box has one id, the kernel refuses any change of groups."""
    if num_ids > 1:
        os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def start_namespaces(bubblewrap: str, hostname: str, user_ns: int, spec: BoxSpec, cgroup: Cgroup) -> Namespaces:
    """Boot the box around the tree at STAGE and return when its pid 1 runs."""
    info_read, info_write = os.pipe()
    stdin_read, stdin_write = os.pipe()
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            cgroup.join()
            os.dup2(stdin_read, 0)
            os.dup2(ready_write, 1)
            os.set_inheritable(info_write, True)
            linux_calls.setns(user_ns, linux_calls.CLONE_NEWUSER)
            change_user(spec.num_ids)
            # Without any environment, because the box's root can read that of pid 1.
            os.execve(bubblewrap, _arguments(hostname, info_write, spec.memory_bytes // 4), {})
        except OSError as error:
            os.write(2, f"bubblewrap: {error}\n".encode())
        finally:
            os._exit(127)
    for fd in (info_write, stdin_read, ready_write):
        os.close(fd)
    with open(info_read, "rb") as file:
        info = file.read()
    if not info or os.read(ready_read, 1) != b"r":
        os.waitpid(pid, 0)
        raise BoxFaultError("internal", "the box could not be started; boxd.log has bubblewrap's words")
    os.close(ready_read)
    init_pid = int(json.loads(info)["child-pid"])
    # the OOM killer must choose a process of the workload, never the box's first process
    for keeper in (pid, init_pid):
        with contextlib.suppress(OSError), open(f"/proc/{keeper}/oom_score_adj", "w") as score:
            score.write("-1000")
    return Namespaces(
        user=user_ns,
        num_ids=spec.num_ids,
        fds={kind: os.open(f"/proc/{init_pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _KINDS},
        init_pid=init_pid,
        bwrap_pid=pid,
        keep_alive=stdin_write,
    )


def _arguments(hostname: str, info_fd: int, shared_memory_bytes: int) -> list[str]:
    """Limit /dev/shm, because its memory is not freed when processes end; /dev itself accepts no files."""
    flags = "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup --die-with-parent --as-pid-1"
    shared = ["--perms", "1777", "--size", str(shared_memory_bytes), "--tmpfs", "/dev/shm"]
    tree = ["--bind", STAGE, "/", "--proc", "/proc", "--dev", "/dev", *shared, "--remount-ro", "/dev"]
    names = ["--hostname", hostname, "--cap-drop", "ALL", "--info-fd", str(info_fd)]
    return ["bwrap", *flags.split(), *names, *tree, "--", *_PID_ONE]
