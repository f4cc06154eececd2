"""Work in another namespace, which only a thread joins."""

import os
import subprocess
from collections.abc import Iterator
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


def test_an_error_of_the_work_is_the_callers(other_network: int) -> None:
    with pytest.raises(ZeroDivisionError):
        linux_calls.within(other_network, linux_calls.CLONE_NEWNET, lambda: 1 // 0)
    with pytest.raises(OSError, match="setns"):
        linux_calls.within(other_network, linux_calls.CLONE_NEWPID, network)
