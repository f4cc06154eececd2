"""An engine on another node of a real Ray cluster: it runs there, and ends with the process that has placed it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from engine.process import EngineSettings
from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import MachineError
from ratchet.types import EngineState
from store import engines
from store.database import Database
from tests.integration.adapter.conftest import engine_process
from tests.integration.training.test_ray_driver import ON_LOOPBACK, Head, eventually, two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
__all__ = ["two_nodes"]
PART = """
import sys
from engine.process import EngineSettings
from engine.ray_engine import run_engine_on_node
run_engine_on_node(EngineSettings.model_validate_json(sys.argv[1]), sys.argv[2], sys.argv[3])
"""


@contextlib.asynccontextmanager
async def placed(settings: EngineSettings, node: str, head: Head) -> AsyncIterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", PART, settings.model_dump_json(), node, head.address]
    environment = {**os.environ, **ON_LOOPBACK}
    part = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield part
    finally:
        part.kill()
        part.wait()
        assert part.stderr is not None
        part.stderr.close()


async def test_an_engine_runs_on_the_named_node(
    database: Database, postgres_url: str, two_nodes: tuple[Head, Head], tmp_path: Path
) -> None:
    head, node = two_nodes

    async def row() -> engines.EngineRow | None:
        async with database.begin() as connection:
            return next(iter(await engines.list_engines(connection, DEFAULT_SET)), None)

    async def is_ready() -> bool:
        return (found := await row()) is not None and found.state is EngineState.READY

    async def is_gone() -> bool:
        return await row() is None

    async with engine_process() as (address, server):
        settings = EngineSettings(
            model_path=tmp_path,
            port=int(address.rpartition(":")[2]),
            database_url=postgres_url,
            state_dir=tmp_path / "engines",
            policies_root=tmp_path,
            is_attached=True,
        )
        async with placed(settings, "127.0.0.3", head) as part:
            await eventually(is_ready, "the engine is ready")
            found = await row()
            assert found is not None
            wrapper = psutil.Process(found.details["pid"])
            assert node.process.pid in [parent.pid for parent in wrapper.parents()], "it runs on the node"
            part.terminate()
            await eventually(is_gone, "the wrapper has taken its leave")
            await asyncio.to_thread(part.wait)
        assert server.poll() is None
        async with placed(settings, "127.0.0.9", head) as part:
            _, said = await asyncio.to_thread(part.communicate)
        assert MachineError.__name__ in said and "127.0.0.2, 127.0.0.3" in said
