"""Boxes on other hosts: gateways and workers over real sshds, between network namespaces with a loopback each."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from stack.ports import free_port
from tests.free_ports import free_ports
from tests.network_hosts import network_hosts, ssh_server

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
USE = """
import asyncio, os, sys
from pathlib import Path
from ratchet.errors import SandboxBusyError
from sandboxes.e2b import E2BProvider
from stack import host_process
from stack.box_hosts import box_hosts
from stack.cluster import read_cluster
from stack.parts import Stack

async def use(num_hosts):
    provider = E2BProvider(*(os.environ[name] for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL")))
    address = f"http://127.0.0.1:{os.environ['ADAPTER_PORT']}"
    call = f"import urllib.request as u; print(u.urlopen('{address}').read())"
    seen = set()
    while len(seen) < num_hosts:
        try:
            box = await provider.create("host", ttl_seconds=60, metadata={}, idempotency_key=os.urandom(8).hex())
            said = (await box.exec(f'python3 -c "{call}"')).stdout
            seen.add(box.id[1:7])
            print("box", len(seen), "said", said, flush=True)
            await box.kill()
        except SandboxBusyError:  # a gateway or the front was killed and starts again
            await asyncio.sleep(0.2)
    await provider.close()

host_process._START_SECONDS = 60.0
with box_hosts(read_cluster(Path(sys.argv[1])), Stack(), *[lambda *words: print(*words, flush=True)] * 2):
    assert not Stack().has_gateway
    while number := input():
        asyncio.run(use(int(number)))
"""
MISTYPED = "127.0.0.9"
"""An address at which no sshd listens: it neither fails the launch nor keeps its boxes waiting."""
ADAPTER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers(), self.wfile.write(b"the adapter of the head")
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def eventually(holds: Callable[[], bool], said: Callable[[], str], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, said()
        time.sleep(0.1)


def test_boxes_on_other_hosts_reach_the_adapter_of_the_head(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    free_ports(state)
    port = free_port()
    with (
        network_hosts(4) as (head, *others),
        ssh_server([one.address for one in others], 22, [one.inside() for one in others]) as ssh,
    ):
        cluster, log = tmp_path / "cluster.yaml", tmp_path / "log"
        before = [sorted(one.commands()) for one in others]

        def write(number: int) -> None:
            hosts = {address: {"boxes": True} for address in (MISTYPED, *(one.address for one in others[:number]))}
            text = yaml.safe_dump({"head": head.address, "hosts": hosts, "ssh": list(ssh), "user": "root"})
            cluster.with_suffix(".new").write_text(text)
            cluster.with_suffix(".new").replace(cluster)

        write(2)
        adapter = subprocess.Popen(head.inside(sys.executable, "-c", ADAPTER, str(port)))
        with log.open("wb") as output:
            user = subprocess.Popen(
                head.inside(sys.executable, "-P", "-c", USE, str(cluster)),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "RATCHET_HOME": str(state), "ADAPTER_PORT": str(port)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        try:
            assert user.stdin is not None

            def says(text: str) -> None:
                eventually(lambda: text in log.read_text() or user.poll() is not None, log.read_text, 120)
                assert text in log.read_text(), log.read_text()

            user.stdin.write(b"2\n")
            user.stdin.flush()
            says("box 2 said b'the adapter of the head'")
            assert f"the gateway {MISTYPED} was not up within 60 s" in log.read_text()
            key = (state / "box_host.key").read_text()
            for one in others[:2]:
                for part in (f"gateway --name={one.address}", "worker --queue=boot --queue=agent --queue=grade"):
                    assert any(f"ratchet part {part}" in line for line in one.commands()), one.commands()
            assert not any(key in " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))
            kill(f"ratchet part gateway --name={others[0].address}")
            says(f"the gateway {others[0].address} has ended")
            kill(f"part gateway --front {state}/box_hosts.json")
            says("the front has ended")
            write(3)
            says(f"boxes and workers are on {', '.join(one.address for one in others)}")
            user.stdin.write(b"3\n")
            user.stdin.flush()
            says("box 3 said b'the adapter of the head'")
            assert set(json.loads((state / "box_hosts.json").read_text())) == {one.address for one in others}
        finally:
            user.communicate(b"\n", timeout=60)
            adapter.kill()
            adapter.wait()
        assert user.returncode == 0, log.read_text()
        eventually(lambda: [sorted(one.commands()) for one in others] == before, lambda: str(others[0].commands()))


def kill(words: str) -> None:
    """Kill the part whose command has these words; ssh and shells have them among others in one argument."""
    for one in psutil.process_iter(["cmdline"]):
        if words in " ".join(one.info["cmdline"] or []) and not any(words in part for part in one.info["cmdline"]):
            one.send_signal(signal.SIGKILL)
