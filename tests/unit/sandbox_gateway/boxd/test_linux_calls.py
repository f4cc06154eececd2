"""Work in another namespace, which only a thread joins."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from sandbox_gateway.boxd import linux_calls


@pytest.fixture
def other_network() -> Iterator[int]:
    with subprocess.Popen(["unshare", "-n", "sh", "-c", "echo up; read _"], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != b"up\n":
            pytest.skip("this user may not make network namespaces")
        namespace = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)
        yield namespace
        os.close(namespace)
        process.stdin.close()


def network() -> str:
    return os.readlink("/proc/thread-self/ns/net")


def test_only_the_work_is_in_the_other_namespace(other_network: int) -> None:
    own = network()
    joined = linux_calls.within(other_network, linux_calls.CLONE_NEWNET, network)
    assert joined == f"net:[{os.fstat(other_network).st_ino}]" != own == network()


_READ_ONLY = """
import os
from sandbox_gateway.boxd import linux_calls as calls
calls.unshare(calls.CLONE_NEWNS)
calls.make_mounts_private()
calls._SYS_MOUNT_SETATTR = {number}
for name in ("from", "to"):
    os.mkdir(name)
calls.mount_file_system("none", "from", "tmpfs", "")
os.mkdir("from/under it")
calls.mount_file_system("none", "from/under it", "tmpfs", "")
if {top_is_read_only}:
    calls._check(calls._libc.mount(None, b"from", None, 32 | 4096 | 1, None), "remount")
calls.attach_tree(calls.clone_tree("from", idmap_user_ns=None), "to", read_only=True)
for directory in ("to", "to/under it"):
    assert os.statvfs(directory).f_flag & os.ST_RDONLY, directory
assert os.statvfs("to/under it").f_flag & os.ST_NODEV
assert not os.statvfs("from/under it").f_flag & os.ST_RDONLY
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts take root")
@pytest.mark.parametrize("number", (linux_calls._SYS_MOUNT_SETATTR, 9999), ids=("has_mount_setattr", "older"))
@pytest.mark.parametrize("top_is_read_only", (False, True))
def test_a_tree_is_read_only_with_all_that_is_mounted_in_it(
    number: int, top_is_read_only: bool, tmp_path: Path
) -> None:
    """A number without a system call stands for a kernel before 5.12."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n{_READ_ONLY.format(number=number, top_is_read_only=top_is_read_only)}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_an_error_of_the_work_is_the_callers(other_network: int) -> None:
    with pytest.raises(ZeroDivisionError):
        linux_calls.within(other_network, linux_calls.CLONE_NEWNET, lambda: 1 // 0)
    with pytest.raises(OSError, match="setns"):
        linux_calls.within(other_network, linux_calls.CLONE_NEWPID, network)
