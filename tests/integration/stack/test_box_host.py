"""Boxes on another host: gateway and worker over a real sshd, between network namespaces with a loopback each."""

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
from sandboxes.e2b import E2BProvider
from stack.box_host import box_host
from stack.cluster import read_cluster
from stack.parts import Stack

async def use():
    provider = E2BProvider(*(os.environ[name] for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL")))
    box = await provider.create("host", ttl_seconds=60, metadata={}, idempotency_key="one")
    address = f"http://127.0.0.1:{os.environ['ADAPTER_PORT']}"
    call = f"import urllib.request as u; print(u.urlopen('{address}').read())"
    print("box said", (await box.exec(f'python3 -c "{call}"')).stdout, flush=True)
    await box.kill()
    await provider.close()

with box_host(read_cluster(Path(sys.argv[1])), Stack(), *[lambda *words: print(*words, flush=True)] * 2):
    assert not Stack().has_gateway
    asyncio.run(use())
    input()
"""
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


def test_boxes_on_another_host_reach_the_adapter_of_the_head(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    free_ports(state)
    port = free_port()
    with network_hosts(2) as (head, other), ssh_server([other.address], 22, [other.inside()]) as ssh:
        cluster = tmp_path / "cluster.yaml"
        hosts = {other.address: {"boxes": True}}
        cluster.write_text(yaml.safe_dump({"head": head.address, "hosts": hosts, "ssh": list(ssh), "user": "root"}))
        log = tmp_path / "log"
        adapter = subprocess.Popen(head.inside(sys.executable, "-c", ADAPTER, str(port)))
        before = other.commands()
        variables = {"RATCHET_HOME": str(state), "ADAPTER_PORT": str(port)}
        with log.open("wb") as output:
            user = subprocess.Popen(
                head.inside(sys.executable, "-P", "-c", USE, str(cluster)),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        try:
            eventually(lambda: "box said" in log.read_text() or user.poll() is not None, log.read_text, 120)
            assert "box said b'the adapter of the head'" in log.read_text(), log.read_text()
            key = (state / "box_host.key").read_text()
            there = other.commands()
            for part in ("gateway", "worker --queue=boot --queue=agent --queue=grade"):
                assert any(f"ratchet part {part}" in line for line in there), there
            assert not any(key in " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))
            gateway = next(line for line in there if line.endswith("ratchet part gateway"))
            victim = next(one for one in psutil.process_iter(["cmdline"]) if " ".join(one.info["cmdline"]) == gateway)
            victim.send_signal(signal.SIGKILL)
            eventually(lambda: f"the gateway of {other.address} has ended" in log.read_text(), log.read_text)
            eventually(lambda: any(line.endswith("ratchet part gateway") for line in other.commands()), log.read_text)
        finally:
            user.communicate(b"\n", timeout=60)
            adapter.kill()
            adapter.wait()
        assert user.returncode == 0, log.read_text()
        eventually(lambda: sorted(other.commands()) == sorted(before), lambda: str(other.commands()))
