"""One adapter answers runs of several models: each engine set has its own tokenizer, template and parsers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter.prompt.renderer import Renderer
from adapter.settings import AdapterSettings
from ratchet.store import sessions
from ratchet.store.database import Database
from tests.integration.adapter.conftest import (
    ScriptedEngine,
    adapter_here,
    adapter_settings,
    engine_process,
    open_rollout,
    register,
)
from tests.integration.engine.test_several_engines import ask
from tests.standins.tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with another tokenizer than `model_dir`."""
    directory = tmp_path_factory.mktemp("other")
    make_tokenizer(directory, vocab_size=420)
    return directory


@pytest.fixture
async def other_engine(database: Database, other_dir: Path) -> AsyncIterator[ScriptedEngine]:
    async with engine_process() as (address, process):
        yield await register(database, Renderer(other_dir), address, process, engine_set="b")


async def test_each_set_has_its_own_model_and_one_that_is_added_disturbs_no_other(
    database: Database,
    postgres_url: str,
    model_dir: Path,
    other_dir: Path,
    engine: ScriptedEngine,
    other_engine: ScriptedEngine,
) -> None:
    settings = adapter_settings(postgres_url, model_dir)
    served: dict[str, AdapterSettings] = {"default": settings}
    sets = [served]
    mine = await open_rollout(database, 0)
    theirs = await open_rollout(database, 1, "run-b", "b")
    for one in (engine, other_engine):
        await one.say("first", "second")
    async with asyncio.timeout(300), adapter_here(settings, lambda: sets[0]) as address:
        waiting = asyncio.create_task(ask(address, theirs.token, "hello there"))
        assert await ask(address, mine.token, "hello there") == 200
        assert not waiting.done() and (await other_engine.seen())["calls"] == [], "it is not known what its model is"
        sets[0] = served | {"b": settings.model_copy(update={"model_path": other_dir})}
        assert await waiting == 200
        assert await ask(address, mine.token, "once more") == 200
        sets[0] = {"b": sets[0]["b"]}
        assert await ask(address, theirs.token, "once more") == 200
    for one, opened in ((engine, mine), (other_engine, theirs)):
        calls = (await one.seen())["calls"]
        prompts = [one.renderer.tokenizer.decode(call["ids"]) for call in calls]
        assert len(prompts) == 2 and "hello there" in prompts[0] and "once more" in prompts[1]
        assert {turn.engine_id for turn in await opened.turns()} == {one.id}
    first = [(await one.seen())["calls"][0]["ids"] for one in (engine, other_engine)]
    assert first[0] != first[1], "the same words have other ids"


async def test_calls_of_a_set_that_is_not_served_are_held_like_those_without_a_store(
    database: Database, postgres_url: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get comments, are counted, make room if their client leaves, and end once their session is closed."""
    monkeypatch.setattr("adapter.auth._CACHE_SECONDS", 0.5)
    limits: Any = {"max_held_calls_per_session": 1, "ping_seconds": 0.2}
    settings = adapter_settings(postgres_url, model_dir, **limits)
    sets = {"default": settings}
    theirs = await open_rollout(database, 1, "run-b", "b")
    chat: Any = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    count: Any = {"messages": chat["messages"], "model": "policy"}
    async with (
        asyncio.timeout(120),
        adapter_here(settings, lambda: sets) as address,
        httpx.AsyncClient(base_url=address, headers={"x-api-key": theirs.token}, timeout=60) as http,
    ):
        async with http.stream("POST", "/v1/chat/completions", json=chat) as reply:
            assert (await anext(reply.aiter_lines())).startswith(": ")
            assert (await http.post("/v1/messages/count_tokens", json=count)).status_code == 529
        counting = asyncio.create_task(http.post("/v1/messages/count_tokens", json=count))
        while (await asyncio.wait({counting}, timeout=0.5))[0]:  # the call before has not made room yet
            assert counting.result().status_code == 529
            counting = asyncio.create_task(http.post("/v1/messages/count_tokens", json=count))
        async with database.begin() as connection:
            await sessions.close_session(connection, theirs.rollout_id, 1)
        assert (await counting).status_code == 401
