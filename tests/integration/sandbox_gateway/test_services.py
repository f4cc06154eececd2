"""E2B's services beyond commands and files: terminals, ports, signed URLs, metrics; through the unmodified SDK if it
has them.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from e2b import AsyncSandbox, CommandExitException
from e2b.sandbox.commands.command_handle import PtySize

from sandboxes.base import Sandbox
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess, eventually

PAGE = b"from inside"


async def sdk_box(gateway: GatewayProcess, box: Sandbox) -> AsyncSandbox:
    return await AsyncSandbox.connect(box.id, api_key=API_KEY, api_url=gateway.url, sandbox_url=gateway.url)


async def test_a_terminal(gateway: GatewayProcess, shared_box: Sandbox) -> None:
    box, shown = await sdk_box(gateway, shared_box), bytearray()
    terminal = await box.pty.create(PtySize(rows=30, cols=100), on_data=shown.extend, user="agent", timeout=0)

    async def says(text: bytes) -> None:
        async def seen() -> bool:
            return text in shown

        await eventually(seen)

    await box.pty.send_stdin(terminal.pid, b"tty; stty size\n")
    await says(b"/dev/pts/")
    await says(b"30 100")
    await box.pty.resize(terminal.pid, PtySize(rows=50, cols=120))
    # One process prints and becomes `cat`, so that it is in the foreground when its output arrives and ^C ends it. With
    # `echo; cat`, ^C could arrive before `cat` had started, and `cat` would read the next line.
    await box.pty.send_stdin(terminal.pid, b"stty size; sh -c 'echo of-$USER; exec cat'\n")
    await says(b"50 120")
    await says(b"of-agent")
    await box.pty.send_stdin(terminal.pid, b"\x03")

    async def shell_reads() -> bool:
        # The first lines may still be read by the dying `cat`.
        await box.pty.send_stdin(terminal.pid, b"echo back-$((1 + 1))\n")
        return b"back-2" in shown

    await eventually(shell_reads)
    await box.pty.send_stdin(terminal.pid, b"exit 4\n")
    try:
        await terminal.wait()
    except CommandExitException as ended:
        assert ended.exit_code == 4
    else:
        raise AssertionError("the shell ended with 4")


async def test_of_several_kills_of_a_process_one_says_that_it_lived(
    gateway: GatewayProcess, shared_box: Sandbox
) -> None:
    box = await sdk_box(gateway, shared_box)
    for _ in range(5):
        handle = await box.commands.run("sleep 600", background=True, timeout=0)
        killed = await asyncio.gather(*(box.commands.kill(handle.pid) for _ in range(6)))
        assert sorted(killed) == [False] * 5 + [True]
        assert not await box.commands.kill(handle.pid)


async def test_a_process_that_has_ended_is_not_killed(gateway: GatewayProcess, shared_box: Sandbox) -> None:
    """Its child holds its output open."""
    box = await sdk_box(gateway, shared_box)
    handle = await box.commands.run("sleep 300 & echo $$ > /tmp/main", background=True, timeout=0)
    await shared_box.exec("until [ -s /tmp/main ] && ! kill -0 $(cat /tmp/main) 2>/dev/null; do sleep 0.01; done")
    assert not await box.commands.kill(handle.pid)
    await shared_box.exec("pkill sleep", check=False)


async def test_a_port_of_a_box(gateway: GatewayProcess, shared_box: Sandbox) -> None:
    await shared_box.write_file("/tmp/www/page", PAGE)
    await shared_box.exec("cd /tmp/www && (setsid /opt/ratchet/bin/python3 -m http.server 8765 >/dev/null 2>&1 &)")
    domain = (await sdk_box(gateway, shared_box)).get_host(8765)

    def fetch(host: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(
            options.pop("method", "GET"), gateway.url + path, headers={"Host": host}, trust_env=False, **options
        )

    async def answers() -> bool:
        return (await asyncio.to_thread(fetch, domain, "/page")).status_code == 200

    await eventually(answers)
    assert fetch(domain, "/page").content == PAGE
    assert fetch(domain, "/missing?x=1").status_code == 404
    assert fetch(domain, "/page", method="POST", content=bytes(100_000)).status_code == 501, (
        "what http.server says to a POST"
    )
    closed = fetch(domain.replace("8765-", "8766-"), "/")
    assert closed.status_code == 502 and "port is not open" in closed.json()["message"]
    gone = fetch(domain.replace(shared_box.id, "i" + "0" * 20), "/")
    assert gone.status_code == 502 and "was not found" in gone.json()["message"]
    assert fetch(domain.replace("8765-", "0-"), "/").status_code == 400


async def test_signed_urls_need_no_token(gateway: GatewayProcess, shared_box: Sandbox) -> None:
    box = await sdk_box(gateway, shared_box)
    with httpx.Client(trust_env=False, timeout=60) as client:
        url = box.upload_url("/tmp/signed.txt", use_signature_expiration=60)
        assert client.post(url, files={"file": b"data"}).status_code == 200
        download = box.download_url("/tmp/signed.txt", user="agent")
        assert client.get(download).content == b"data"
        assert client.get(download.replace("signed.txt", "other.txt")).status_code == 401
        assert client.post(download, files={"file": b"more"}).status_code == 401, "a signature to read does not write"
        assert client.get(box.download_url("/tmp/signed.txt", use_signature_expiration=-5)).status_code == 401
        assert client.get(f"{gateway.url}/files?path=/tmp/signed.txt&signature=v1_x").status_code == 401


async def test_metrics_are_measured(gateway: GatewayProcess, shared_box: Sandbox) -> None:
    box = await sdk_box(gateway, shared_box)
    (sample,) = await box.get_metrics()
    assert sample.mem_total == gateway.settings.memory_bytes and 0 <= sample.mem_used <= sample.mem_total
    assert sample.disk_total == gateway.settings.disk_bytes and 0 < sample.disk_used < sample.disk_total
    await shared_box.exec("head -c 30M /dev/urandom > /tmp/on-disk; sync")
    assert (await box.get_metrics())[0].disk_used > sample.disk_used + (20 << 20)
    await shared_box.exec("rm /tmp/on-disk")


def test_list_filters(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    def listed(query: str) -> bool:
        return raw_box["sandboxID"] in {
            row["sandboxID"] for row in gateway.call("GET", f"/v2/sandboxes?{query}").json()
        }

    now = datetime.now(UTC)
    assert listed("template=base") and not listed("template=other")
    assert listed(f"startedAfter={(now - timedelta(hours=1)).strftime('%Y-%m-%dT%H:%M:%SZ')}")
    assert not listed(f"startedAfter={(now + timedelta(hours=1)).strftime('%Y-%m-%dT%H:%M:%SZ')}")
    assert gateway.call("GET", "/v2/sandboxes?startedAfter=soon").status_code == 400
    assert listed("state=running") and not listed("state=paused")
