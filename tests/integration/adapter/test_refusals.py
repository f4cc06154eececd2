"""A call that is refused for what it contains has no turn, but the session shows that it was made."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.store import sessions
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings

HELLO = [{"role": "user", "content": "hello"}]


async def has_called(opened: Opened) -> bool:
    key = (opened.rollout_id, 1)
    async with opened.database.begin() as connection:
        return (await sessions.read_progress(connection, [key]))[key].has_called


async def ask(address: str, token: str, path: str = "/v1/chat/completions", **body: Any) -> int:
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.post(address + path, json={"model": "policy", **body}, headers=headers)).status_code


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400),  # the context is full
        ({"messages": HELLO, "padding": "x" * 200_000}, 413),  # the request is too large
        ({"messages": HELLO, "n": 2}, 400),  # it cannot be served
        ({"messages": HELLO, "model": "another"}, 404),
    ],
)
async def test_a_refused_first_call_is_recorded(
    postgres_url: str, model_dir: Path, opened: Opened, body: dict[str, Any], status: int
) -> None:
    async with adapter_here(adapter_settings(postgres_url, model_dir, max_body_bytes=100_000)) as address:
        assert not await has_called(opened)
        assert await ask(address, opened.token, **body) == status
    assert await has_called(opened) and not await opened.turns()


async def test_what_is_no_model_call_is_not_recorded(adapter: str, opened: Opened) -> None:
    """Neither a wrong token nor another route, counting tokens or a list of models begins a model call."""
    assert await ask(adapter, "another token", messages=HELLO) == 401
    assert await ask(adapter, opened.token, "/v1/completions", prompt="hello") == 404
    assert await ask(adapter, opened.token, "/v1/messages/count_tokens", messages=[{"role": "nobody"}]) == 400
    assert not await has_called(opened)


async def test_a_call_that_is_answered_is_recorded(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("hello")
    assert await ask(adapter, opened.token, messages=HELLO) == 200
    assert await has_called(opened)
