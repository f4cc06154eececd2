"""One adapter answers runs of several models: each engine set has its own tokenizer, template and parsers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapter.prompt.renderer import Renderer
from adapter.served_sets import ServedSets, SetNotServedError
from adapter.settings import AdapterSettings
from adapter.store_outage import StoreOutage
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.routing import EngineRouter
from ratchet.background_task import running_beside
from store import sessions
from store.database import Database
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
        asyncio.timeout(600),
        adapter_here(settings, lambda: sets) as address,
        httpx.AsyncClient(base_url=address, headers={"x-api-key": theirs.token}, timeout=300) as http,
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


async def test_only_a_set_whose_tokenizer_cannot_be_used_waits(
    database: Database,
    postgres_url: str,
    model_dir: Path,
    other_dir: Path,
    tmp_path: Path,
    other_engine: ScriptedEngine,
) -> None:
    """Also if it is the first one; once the plan has another model for it, its calls go on."""
    settings = adapter_settings(postgres_url, tmp_path)
    served = {"default": settings, "b": settings.model_copy(update={"model_path": other_dir})}
    sets = [served]
    mine, theirs = await open_rollout(database, 0), await open_rollout(database, 1, "run-b", "b")
    await other_engine.say("first", "second")
    async with asyncio.timeout(120), adapter_here(settings, lambda: sets[0]) as address, httpx.AsyncClient() as http:
        waiting = asyncio.create_task(ask(address, mine.token))
        assert await ask(address, theirs.token, "hello there") == 200
        assert (await http.get(address + "/health")).json()["status"].startswith("calls of engine set default wait: ")
        assert not waiting.done()
        sets[0] = served | {"default": settings.model_copy(update={"model_path": model_dir})}
        async with engine_process() as (other_address, process):
            await register(database, Renderer(model_dir), other_address, process, "third")
            assert await waiting == 200
        assert (await http.get(address + "/health")).json()["status"] == "ok"


async def test_what_a_set_needed_is_dropped_after_its_plan_has_changed(
    database: Database,
    postgres_url: str,
    model_dir: Path,
    other_dir: Path,
    other_engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("adapter.served_sets._UNUSED_SECONDS", 0.0)
    settings = adapter_settings(postgres_url, model_dir)
    of_b = settings.model_copy(update={"model_path": other_dir})
    sets: list[dict[str, AdapterSettings]] = [{"default": settings, "b": of_b}]
    outage, router = StoreOutage(database), EngineRouter(database)
    waits = EngineWaits(database, router, outage)
    served = ServedSets(settings, database, router, outage, waits, lambda: sets[0])
    opened = await open_rollout(database, 1, "run-b", "b")
    async with asyncio.timeout(120), running_beside(served.keep_reading()), database.begin() as connection:
        row = await sessions.find_session(connection, sessions.token_hash(opened.token))
        assert row is not None
        before = await served.of(row)
        for after in ({"default": settings, "b": of_b.model_copy(update={"max_sessions": 7})}, {"default": settings}):
            sets[0] = after
            while before in served.all():
                await asyncio.sleep(0.1)
            if "b" in after:
                before = await served.of(row)
        with pytest.raises(SetNotServedError, match="engine set b is not served"):
            await served.of(row)
    await served.close()
    await router.close()
