"""Things that a box cannot see, reach or exhaust."""

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.boxd import cgroups
from sandboxes.base import Sandbox
from sandboxes.e2b import E2BProvider
from tests.integration.sandbox_gateway.conftest import (
    ADAPTER_ANSWER,
    CHECKOUT,
    NUM_REPEATS_BIG,
    GatewayProcess,
    make_box,
)

_FETCH = (
    "python3 - <<'E'\nimport urllib.request\nprint(urllib.request.urlopen('http://{}', timeout=5).read().decode())\nE"
)

FORK_BOMB = """\
import os, signal
num_forked = 0
try:
    while num_forked < 1000:
        if os.fork() == 0:
            signal.pause()
        num_forked += 1
except OSError:
    print(num_forked)
    raise SystemExit(9)
"""


async def test_no_host_path_is_visible(box: Sandbox, gateway: GatewayProcess) -> None:
    assert (await box.exec("ls -A /root /home")).stdout == "/home:\nagent\n\n/root:\n"
    for hidden in (
        CHECKOUT,
        gateway.settings.root_directory,
        Path.home() / ".cache",
        Path("/boot"),
        Path("/etc/ssh"),
        Path("/sys"),
    ):
        assert (await box.exec(f"ls -d {hidden}", check=False)).exit_code != 0, f"{hidden} is visible"
    assert (await box.exec("ls -A /tmp /run /var/tmp /workspace /srv /mnt")).stdout.split() == [
        "/mnt:", "/run:", "/srv:", "/tmp:", "/var/tmp:", "/workspace:",
    ]  # fmt: skip


async def test_writable_directories(box: Sandbox) -> None:
    await box.exec("for d in /tmp /workspace /home/agent /root /run /var/tmp; do echo x > $d/x || exit 1; done")
    await box.exec("for d in /tmp /home/agent /var/tmp; do echo x > $d/y || exit 1; done", user="agent")
    assert (await box.exec("echo x > /usr/x || echo x > /etc/x || echo x > /opt/ratchet/x", check=False)).exit_code != 0


async def test_boxes_do_not_share_files_or_processes(provider: E2BProvider, box: Sandbox) -> None:
    async with await make_box(provider) as other:
        await other.exec("echo mine > /tmp/mine; (sleep 300 &)")
        assert (await box.exec("ls /tmp; pgrep -c sleep", check=False)).stdout == "0\n"


async def test_only_the_egress_port_is_reachable(box: Sandbox, adapter_port: int, gateway: GatewayProcess) -> None:
    for user in ("root", "agent"):
        answer = await box.exec(_FETCH.format(f"127.0.0.1:{adapter_port}/"), user=user)
        assert answer.stdout.strip() == ADAPTER_ANSWER.decode()
        for closed in (f"127.0.0.1:{gateway.settings.port}/health", "169.254.169.254/", "192.0.2.1/", "host.invalid/"):
            assert (await box.exec(_FETCH.format(closed), user=user, check=False)).exit_code == 1, f"{closed} answers"
    assert (await box.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '")).stdout.split() == ["lo"]


async def test_a_slow_reader_gets_all_and_stops_nobody(box: Sandbox, adapter_port: int) -> None:
    slow = f"""import time, urllib.request
answer = urllib.request.urlopen("http://127.0.0.1:{adapter_port}/big")
first = answer.read(10)
open("/tmp/waiting", "w").close()
while not __import__("os").path.exists("/tmp/go"): time.sleep(0.01)
print(len(first + answer.read()))
"""
    await box.write_file("/workspace/slow.py", slow)
    reading = asyncio.create_task(box.exec("python3 /workspace/slow.py"))
    await box.exec("while [ ! -e /tmp/waiting ]; do sleep 0.01; done")
    assert (await box.exec(_FETCH.format(f"127.0.0.1:{adapter_port}/"))).stdout.strip() == ADAPTER_ANSWER.decode()
    await box.exec("touch /tmp/go")
    assert int((await reading).stdout) == len(ADAPTER_ANSWER) * NUM_REPEATS_BIG


async def test_no_privileges_beyond_the_box(box: Sandbox) -> None:
    assert (await box.exec("grep NoNewPrivs /proc/self/status", user="agent")).stdout.split()[1] == "1"
    assert (await box.exec("grep CapEff /proc/self/status", user="agent")).stdout.split()[1] == "0" * 16
    for forbidden in ("mount -t tmpfs none /mnt", "mknod /tmp/d b 8 0", "unshare -m true", "hostname other"):
        assert (await box.exec(forbidden, check=False)).exit_code != 0, forbidden
    assert (await box.exec("kill -9 1; echo alive")).stdout == "alive\n"


async def test_orphans_are_reaped(box: Sandbox) -> None:
    await box.exec("for i in $(seq 20); do (setsid true &) ; done")
    assert (await box.exec("sleep 0.2; ps -eo stat | grep -c Z", check=False)).stdout == "0\n"


@pytest.mark.skipif(cgroups.usable_version() == 0, reason="this machine has no writable control groups")
async def test_a_fork_bomb_is_contained(box: Sandbox) -> None:
    await box.write_file("/workspace/bomb.py", FORK_BOMB)
    result = await box.exec("python3 /workspace/bomb.py", user="agent", check=False)
    assert result.exit_code == 9 and int(result.stdout) < 96
    assert (await box.exec("pkill -9 -u agent; echo alive")).stdout == "alive\n"


@pytest.mark.skipif(cgroups.usable_version() == 0, reason="this machine has no writable control groups")
async def test_a_memory_hog_is_contained(box: Sandbox) -> None:
    result = await box.exec("exec python3 -c 'x = bytearray(900 << 20)'", check=False)
    assert result.exit_code == -1
    assert (await box.exec("echo alive")).stdout == "alive\n"
