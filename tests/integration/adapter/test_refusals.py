"""A call that is refused for what it contains has no turn, but the session shows that it was made."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.harnesses.cli_exits import exit_of_error
from ratchet.types import AgentExit
from store import sessions
from store.sessions import SessionProgress
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_here, adapter_settings

HELLO = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "word " * 3000}]


async def progress(opened: Opened) -> SessionProgress:
    key = (opened.rollout_id, 1)
    async with opened.database.begin() as connection:
        return (await sessions.read_progress(connection, [key]))[key]


async def ask(address: str, token: str, path: str = "/v1/chat/completions", **body: Any) -> int:
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return (await http.post(address + path, json={"model": "policy", **body}, headers=headers)).status_code


@pytest.mark.parametrize(
    ("body", "status", "words", "exit"),
    [
        (
            {"messages": [{"role": "user", "content": "word " * 3000}]},
            400,
            "prompt is too long",
            AgentExit.CONTEXT_FULL,
        ),
        ({"messages": HELLO, "padding": "x" * 200_000}, 413, "100000", AgentExit.CONTEXT_FULL),
        ({"messages": HELLO, "n": 2}, 400, "n", AgentExit.CRASHED),
        ({"messages": HELLO, "model": "another"}, 404, "another", AgentExit.CRASHED),
    ],
)
async def test_a_refused_first_call_is_recorded_with_its_reason(
    postgres_url: str,
    model_dir: Path,
    opened: Opened,
    body: dict[str, Any],
    status: int,
    words: str,
    exit: AgentExit,
) -> None:
    async with adapter_here(adapter_settings(postgres_url, model_dir, max_body_bytes=100_000)) as address:
        assert (await progress(opened)).refusal is None
        assert await ask(address, opened.token, **body) == status
        found = await progress(opened)
        assert not found.has_called and found.refusal is not None and words in found.refusal
        assert exit_of_error(found.refusal) is exit, found.refusal
        assert await ask(address, opened.token, messages=HELLO, n=3) == 400
        assert (await progress(opened)).refusal == found.refusal, "the first one stays"
    assert not await opened.turns()


async def test_what_is_no_model_call_is_not_recorded(adapter: str, opened: Opened) -> None:
    """Neither a wrong token nor another route, counting tokens or a list of models begins a model call."""
    assert await ask(adapter, "another token", messages=HELLO) == 401
    assert await ask(adapter, opened.token, "/v1/completions", prompt="hello") == 404
    assert await ask(adapter, opened.token, "/v1/messages/count_tokens", messages=[{"role": "nobody"}]) == 400
    found = await progress(opened)
    assert not found.has_called and found.refusal is None


async def test_a_call_that_is_answered_is_recorded(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("hello")
    assert await ask(adapter, opened.token, messages=HELLO) == 200
    assert (await progress(opened)).has_called
