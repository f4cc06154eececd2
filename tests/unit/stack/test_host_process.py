import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stack import host_process
from stack.cluster import Cluster
from stack.host_process import HostProcess, here, over_ssh


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    values = {"head": "127.0.0.1", "hosts": {}, "directory": tmp_path, "user": "train", "ssh": ["-p", "2222"]}
    return Cluster.model_validate(values)


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_variables_come_by_its_input_and_output_goes_to_the_log(cluster: Cluster, tmp_path: Path) -> None:
    lines: list[str] = []
    command = here(cluster, ["sh", "-c", 'pwd; echo "$KEY and $OPEN"; exec sleep 1000'], {"OPEN": "an open one"})
    process = HostProcess("it", command, print, "and an open", {"KEY": "a  'secret' = one "}, lines.append)
    assert process.is_up.wait(60)
    assert "secret" not in str(command)
    process.end()
    process.wait_ended()
    assert lines[:2] == [str(tmp_path), "a  'secret' = one  and an open one"]


def test_it_is_started_again_until_it_is_ended(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_process, "_AGAIN_SECONDS", 0.01)
    said: list[str] = []
    script = "echo >> starts; [ $(wc -l < starts) -lt 3 ] && echo no luck || echo other; exit 3"
    process = HostProcess("it", here(cluster, ["sh", "-c", script], {}), said.append)
    eventually(lambda: len(said) > 1)
    process.end()
    process.wait_ended()
    assert said[0] == "it has ended with status 3: no luck; starting again"
    assert said[1] == "it has ended with status 3: no luck; no luck; other; starting again", (
        "an end like the one before"
    )


def test_its_whole_group_ends_with_its_input(cluster: Cluster, tmp_path: Path) -> None:
    script = "sleep 1000 & echo $! > child; echo up; wait"
    process = HostProcess("it", here(cluster, ["sh", "-c", script], {}), print, "up")
    assert process.is_up.wait(60)
    child = psutil.Process(int((tmp_path / "child").read_text()))
    own = child.parent()
    assert own is not None
    process.end()
    process.wait_ended()
    eventually(lambda: has_ended(child))  # it has got its signal, which it may not have seen yet
    eventually(
        lambda: not [one for one in psutil.process_iter(["cmdline"]) if str(own.pid) in (one.info["cmdline"] or [])]
    )


def test_over_ssh_the_connections_own_options_come_first(cluster: Cluster) -> None:
    command = over_ssh(cluster, "10.0.0.2", ["sleep", "1"], {"A": "b c"}, ["-R", "1:127.0.0.1:1"])
    assert command[:-1] == ["ssh", "-o", "BatchMode=yes", "-R", "1:127.0.0.1:1", "-p", "2222", "train@10.0.0.2"]
    assert "A=b c" in command[-1] and command[-1].startswith("sh -c ")
