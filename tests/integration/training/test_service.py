"""The learner service goes on after any error of one run's driver, or of the store."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from store.database import Database
from tests.integration.training.records import make_config, make_run
from tests.standins.failing_database import FailingDatabase
from training import service


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the program that the service starts as a driver; it does not exist yet."""
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "driver"))
    return tmp_path / "driver"


def write_driver(program: Path, body: str) -> None:
    """Make a driver that runs `body` with the run's id as $4."""
    fresh = program.with_suffix(".new")
    fresh.write_text(f"#!/bin/sh\n{body}\n")
    fresh.chmod(0o755)
    fresh.rename(program)


async def wait_for_failed_starts(logs: Sequence[Mapping[str, Any]], run_ids: set[str]) -> None:
    """Wait until a driver of each of these runs could not be started, which the service has logged."""
    while not run_ids <= {line.get("run") for line in logs if line["event"] == "driver died"}:
        await asyncio.sleep(0.01)


async def test_a_driver_that_cannot_be_started_is_started_later(program: Path) -> None:
    """Its OSError ended the service before, and with it the drivers of all other runs."""
    with capture_logs() as logs:
        keeper = asyncio.create_task(service._keep_driver("run", "postgresql://127.0.0.1:1/none"))
        async with asyncio.timeout(60):
            await wait_for_failed_starts(logs, {"run"})
            assert not keeper.done()
            write_driver(program, "exit 0")
            await keeper


async def test_the_service_goes_on_while_a_fork_fails(
    program: Path, postgres_url: str, database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for run_id in ("run-a", "run-b"):
        await make_run(database, run_id, make_config())
    opened: list[FailingDatabase] = []

    def open_database(url: str, pool_size: int) -> FailingDatabase:
        opened.append(FailingDatabase(url, pool_size))
        return opened[-1]

    monkeypatch.setattr(service, "Database", open_database)
    with capture_logs() as logs:
        running = asyncio.create_task(service.run_learner_service(postgres_url))
        async with asyncio.timeout(60):
            await wait_for_failed_starts(logs, {"run-a", "run-b"})
    try:
        assert not running.done()
        opened[0].num_failures = 2
        write_driver(program, f'echo > {tmp_path}/"$4"')
        async with asyncio.timeout(60):
            while opened[0].num_failures or not all((tmp_path / run_id).exists() for run_id in ("run-a", "run-b")):
                await asyncio.sleep(0.05)
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait({running})
        await opened[0].close()
