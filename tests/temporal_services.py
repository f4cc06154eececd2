"""Temporal's own server on an embedded Postgres, as processes that a test starts and ends."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import Client

from ratchet import temporal_client
from ratchet.temporal_settings import TemporalSettings, load_temporal_settings
from stack import temporal_namespace
from stack.parts import Stack
from stack.postgres import ensure_database
from stack.temporal_build import find_go, server_program
from stack.temporal_server import TemporalKind, settle_temporal_kind
from tests.free_ports import free_ports

ROOT = Path(__file__).parents[1]


class TemporalServices:
    """The parts of a stack's Temporal as processes, started by their own commands."""

    def __init__(self, home: Path) -> None:
        home.chmod(0o755)  # the embedded Postgres runs as another user
        free_ports(home)
        self.stack = Stack(home)
        address = f"127.0.0.1:{self.stack.ports['temporal']}"
        self.settings: TemporalSettings = load_temporal_settings().model_copy(update={"address": address})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, part: str, **more: str) -> None:
        command = next(one.command for one in self.stack.parts() if one.name == part)
        own = {**self.stack.environment(), "RATCHET_HOME": str(self.stack.home), "NO_PROXY": "127.0.0.1"}
        with (self.stack.home / f"{part}.log").open("ab") as log:
            self.processes[part] = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **own, **more}, stdout=log, stderr=log
            )

    def end(self, part: str, kill: bool = False) -> None:
        process = self.processes.pop(part)
        if kill:
            process.kill()
        elif part == "postgres":
            process.send_signal(2)
        else:
            process.terminate()
        process.wait(60)

    def end_all(self) -> None:
        for part in reversed(list(self.processes)):
            self.end(part)

    async def client(self) -> Client:
        client = await temporal_client.connect_temporal(self.settings, wait_seconds=240)
        await temporal_namespace._add_search_attributes(client)
        return client


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemporalServices]:
    for name in ("TEMPORAL_ADDRESS", "RATCHET_TEMPORAL", "RATCHET_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="ratchet-temporal-", ignore_cleanup_errors=True) as directory:
        found = TemporalServices(Path(directory))
        yield found
        found.end_all()


@pytest.fixture
async def own_server(services: TemporalServices) -> AsyncIterator[TemporalServices]:
    """Temporal's own server, which is started before Postgres is there."""
    if find_go() is None and not server_program().is_file():
        pytest.skip("Temporal's server is not built, and Go is not installed")
    assert settle_temporal_kind(services.stack.home, print) is TemporalKind.SERVER
    services.start("temporal")
    services.start("postgres")
    await ensure_database(services.stack.ports["postgres"], timeout_seconds=240)
    yield services


@contextlib.asynccontextmanager
async def own_temporal() -> AsyncIterator[Client]:
    """Run an empty server during the block, for workflows with stand-in activities."""
    with tempfile.TemporaryDirectory(prefix="ratchet-temporal-", ignore_cleanup_errors=True) as directory:
        services = TemporalServices(Path(directory))
        try:
            services.start("postgres")
            services.start("temporal")
            await ensure_database(services.stack.ports["postgres"], timeout_seconds=240)
            yield await services.client()
        finally:
            services.end_all()


def suggest_continue_as_new(monkeypatch: pytest.MonkeyPatch, num_events: int) -> None:
    """Let workflows of this process continue as new after so many events; Temporal suggests it after 4,096."""
    suggests = lambda info: info.get_current_history_length() >= num_events  # noqa: E731
    monkeypatch.setattr(workflow.Info, "is_continue_as_new_suggested", suggests)
