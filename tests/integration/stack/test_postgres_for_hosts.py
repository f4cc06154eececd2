"""The embedded Postgres of a launch: its hosts reach it with the password, and no other does."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from stack.parts import POSTGRES_HOSTS, Stack
from stack.ports import free_port
from stack.postgres import database_url, ensure_database

HEAD, HOST, STRANGER = "127.0.0.2", "127.0.0.3", "127.0.0.4"
PROGRAM = """
import pathlib, sys
from stack.postgres import run_postgres
run_postgres(pathlib.Path(sys.argv[1]), int(sys.argv[2]), hosts=sys.argv[3:])
"""


async def answer(url: str, source: str) -> int:
    """Return what the server answers to a query from this address."""
    parts = url.rpartition("/")[0]

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = parts.rpartition("@")[2].rpartition(":")
        far = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        await asyncio.gather(copy(reader, far[1]), copy(far[0], writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        login = url.rpartition("@")[0]
        connection = await asyncpg.connect(f"{login}@127.0.0.1:{port}/ratchet")
        try:
            return int(await connection.fetchval("SELECT 1"))
        finally:
            await connection.close()


async def test_hosts_connect_with_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POSTGRES_HOSTS, f"{HEAD} {HOST}")
    monkeypatch.delenv("RATCHET_DATABASE_URL", raising=False)
    stack, port = Stack(tmp_path / "home"), free_port()
    stack.ports["postgres"] = port
    url = stack.environment()["RATCHET_DATABASE_URL"]
    assert url == database_url(port, [HEAD], stack.postgres_password())
    command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "postgres"), str(port), HEAD, HOST]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await ensure_database(port, 300, stack.postgres_password())
        assert await answer(url, HOST) == 1 and await answer(url, HEAD) == 1
        with pytest.raises(asyncpg.InvalidPasswordError):
            await answer(url.replace(stack.postgres_password(), "wrong"), HOST)
        with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError, match="no pg_hba"):
            await answer(url, STRANGER)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def test_the_url_has_an_address_of_ipv6_in_brackets() -> None:
    assert database_url(5432, ["fd00::1", "fd00::2"], "ab") == "postgresql://postgres:ab@[fd00::1]:5432/ratchet"
