"""A real Postgres, a tiny model and directories for published weights and checkpoints.

Why here: every test works on its own run in one shared store, so tests do not see each other.
Called by: pytest.
"""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ratchet.store.database import Database
from ratchet.store.schema import Base
from stack.ports import free_port
from stack.postgres import database_url, ensure_database
from tests.standins.tiny_model import make_tokenizer, make_weights


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data, port = tmp_path_factory.mktemp("pg") / "data", free_port()
    program = "import sys, pathlib; from stack.postgres import run; run(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
    server = subprocess.Popen(
        [sys.executable, "-c", program, str(data), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    async def prepare() -> None:
        await ensure_database(port)
        database = Database(database_url(port))
        async with database.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await database.close()

    try:
        asyncio.run(prepare())
        yield database_url(port)
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    database = Database(postgres_url)
    yield database
    await database.close()


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer(directory, vocab_size=400)
    make_weights(directory)
    return directory
