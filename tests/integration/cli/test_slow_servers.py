"""Commands whose Postgres and Temporal answer late: none ends because an answer is slow.

Commands run as processes of their own, several at once, against real servers behind proxies that delay each answer.
"""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratchet.temporal_client import start_train_run
from store.database import Database
from store.migration import migrate
from tests.integration.cli.test_stopped_stack import ASKING
from tests.integration.training.records import make_config, make_run
from tests.temporal_services import ROOT, TemporalServices, own_server, services

__all__ = ["own_server", "services"]

FEW = ("pause", "show runs", "admin sweep")
"""A command for each way to ask: the store and then Temporal, the store as a reader, Temporal first."""
BROKEN = re.compile(r"Traceback|[Tt]imed? ?out|TimeoutError|has not answered|not (answer|work)|no answer|Cancelled")
AT_ONCE = 40


@contextlib.asynccontextmanager
async def slow_proxy(port: int, seconds: float) -> AsyncIterator[int]:
    """Yield the port of a proxy whose answers take so long on their way; they do not wait for each other."""
    writers: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                loop.call_later(delay, writer.write, data)
        loop.call_later(delay, writer.close)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        writers.extend([writer, back])
        await asyncio.gather(pass_on(reader, back, 0.0), pass_on(there, writer, seconds))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(seconds)  # the delayed calls hold the connections


@dataclass(frozen=True)
class SlowServers:
    """Variables with which commands find both servers behind their proxies."""

    variables: dict[str, str]
    home: Path

    async def run(self, command: str, limit_seconds: float) -> str:
        """Return what the command has said when it has ended, or after the limit: some wait for a worker."""
        arguments = [str(self.home / one) if one == "never-made" else one for one in ASKING[command]]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cli.main", *command.split(), *arguments),
            cwd=ROOT,
            env={**os.environ, **self.variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        said = asyncio.create_task(process.stdout.read())
        done, _ = await asyncio.wait({said}, timeout=limit_seconds)
        if not done:
            process.kill()
        await process.wait()
        return (await said).decode()


@contextlib.asynccontextmanager
async def slow_servers(own: TemporalServices, home: Path, seconds: float) -> AsyncIterator[SlowServers]:
    """Both servers with a run that is open in both of them."""
    url = own.stack.environment()["RATCHET_DATABASE_URL"]
    await asyncio.to_thread(migrate, url)
    async with Database(url) as database:
        await make_run(database, "RUN", make_config())
    await start_train_run(await own.client(), own.settings, "RUN")
    async with (
        slow_proxy(own.stack.ports["postgres"], seconds) as postgres,
        slow_proxy(own.stack.ports["temporal"], seconds) as temporal,
    ):
        variables = {
            "RATCHET_HOME": str(home),
            "RATCHET_DATABASE_URL": url.replace(str(own.stack.ports["postgres"]), str(postgres)),
            "TEMPORAL_ADDRESS": f"127.0.0.1:{temporal}",
        }
        yield SlowServers(variables, home)


async def check(servers: SlowServers, commands: tuple[str, ...], limit_seconds: float) -> None:
    slots, broken = asyncio.Semaphore(AT_ONCE), {}

    async def one(command: str) -> None:
        async with slots:
            said = await servers.run(command, limit_seconds)
        if BROKEN.search(said):
            broken[command] = said[-500:]

    await asyncio.gather(*map(one, commands))
    assert not broken


async def test_no_command_ends_because_an_answer_is_slow(own_server: TemporalServices, tmp_path: Path) -> None:
    async with slow_servers(own_server, tmp_path, 2.5) as servers:
        await check(servers, FEW, limit_seconds=120)


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_no_command_of_the_help_ends_because_an_answer_takes_20_s(
    own_server: TemporalServices, tmp_path: Path
) -> None:
    async with slow_servers(own_server, tmp_path, 20.0) as servers:
        await check(servers, tuple(ASKING), limit_seconds=600)
