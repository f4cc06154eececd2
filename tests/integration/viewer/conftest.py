"""The viewer's app over a filled store, asked in this process."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from store.database import Database
from tests.integration.viewer.filled_store import FilledRun, fill_run
from viewer.app import create_viewer_app
from viewer.routes import search
from viewer.settings import ViewerSettings


@pytest.fixture
async def filled(database: Database, run_id: str, model: Path) -> FilledRun:
    return await fill_run(database, run_id, model)


@pytest.fixture
async def client(database: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(search, "_SECONDS", 600)  # on a busy machine the first page of a search would be a part
    app = create_viewer_app(ViewerSettings(database.url, temporal_ui="http://127.0.0.1:8233"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8420") as client,
    ):
        yield client
