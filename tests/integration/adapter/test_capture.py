"""The adapter's entry points without HTTP, for moments and states that a client of a server cannot bring about.

An answer that is being written, an upload that ends early, the router after a seal, a process that reads a session.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from adapter.app import create_adapter_app
from adapter.auth import SessionAuth, UnauthorisedError
from adapter.dialects.chat import ChatDialect
from adapter.output_parser import OutputParser
from adapter.prompt.renderer import Renderer
from adapter.settings import AdapterSettings
from adapter.store_outage import StoreOutage
from adapter.turns.capture import Capture, PendingCall
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.routing import EngineRouter
from adapter.vllm_parsers import VllmParsers
from store import sessions
from store.database import Database
from store.schema import AdapterProcessTable
from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_settings, open_rollout
from tests.integration.adapter.test_durability import ASK

RETRY = {"x-stainless-retry-count": "1"}


class Parts(NamedTuple):
    capture: Capture
    router: EngineRouter
    auth: SessionAuth

    async def call(self, token: str, headers: dict[str, str] | None = None, messages: Any = ASK) -> PendingCall:
        row = await self.auth.authenticate({"authorization": f"Bearer {token}"})
        return await self.capture.start(row, orjson.dumps({"messages": messages}), ChatDialect(), headers or {})


@contextlib.asynccontextmanager
async def parts_of(settings: AdapterSettings, renderer: Renderer, database: Database) -> AsyncIterator[Parts]:
    router = EngineRouter(database)
    outputs = OutputParser(renderer, VllmParsers(settings.model_path, None, None, {}))
    outage = StoreOutage(database)
    waits = EngineWaits(database, router, outage)
    capture = Capture(settings, database, renderer, outputs, router, outage, waits)
    yield Parts(capture, router, SessionAuth(database, lambda: True))
    await capture.close()
    waits.close()
    await router.close()


@pytest.fixture
async def parts(postgres_url: str, model_dir: Path, renderer: Renderer, database: Database) -> AsyncIterator[Parts]:
    async with parts_of(adapter_settings(postgres_url, model_dir), renderer, database) as parts:
        yield parts


async def lease_of(opened: Opened, process_id: str) -> datetime:
    async with opened.database.begin() as conn:
        found: datetime = await conn.scalar(
            select(AdapterProcessTable.alive_until).where(AdapterProcessTable.id == process_id)
        )
    return found


async def test_a_retry_that_leaves_does_not_disconnect_the_first_client(
    parts: Parts, engine: ScriptedEngine, opened: Opened
) -> None:
    """The first answer is being written; a retry of the call gets the stored one and disconnects."""
    await engine.say("one")
    first = await parts.call(opened.token)
    answer = await first.task
    (row,) = await opened.turns()
    retry = await parts.call(opened.token, RETRY)
    assert (await retry.task).turn_id == answer.turn_id
    await parts.capture.detach(retry)
    (now,) = await opened.turns()
    assert now.lease_owner == row.lease_owner is not None
    async with asyncio.timeout(300):  # the process's lease is still renewed
        lease = await lease_of(opened, now.worker)
        while await lease_of(opened, now.worker) <= lease:
            await asyncio.sleep(0.05)
    await parts.capture.detach(first)
    assert (await opened.turns())[0].lease_owner is None


async def test_an_engine_that_aborts_the_call_of_a_sealed_session_keeps_its_calls(
    parts: Parts, engine: ScriptedEngine, database: Database, opened: Opened
) -> None:
    other = await open_rollout(database, 1)
    await engine.script({"ids": engine.ids("late"), "hold": "gate", "finish": "abort"})
    call = await parts.call(opened.token)
    await engine.wait_for_calls(1)
    async with database.begin() as conn:
        await sessions.close_session(conn, opened.rollout_id, 1)
    await engine.release("gate")
    with pytest.raises(UnauthorisedError):
        await call.task
    async with database.begin() as conn:
        row = await sessions.find_session(conn, sessions.token_hash(other.token))
    assert row is not None
    likely = parts.router.likely(row)
    assert likely is not None and likely.id == engine.id


async def test_a_lane_with_a_long_name_is_known_from_the_store(
    parts: Parts, postgres_url: str, model_dir: Path, renderer: Renderer, engine: ScriptedEngine, opened: Opened
) -> None:
    """The store has a digest in place of a long name."""
    await engine.say("one", "two")
    lane = {"x-claude-code-agent-id": "a" * 150}
    first = await parts.call(opened.token, lane)
    answer = (await first.task).message.text
    await parts.capture.detach(first)
    more = [*ASK, {"role": "assistant", "content": answer}, {"role": "user", "content": "next"}]
    settings = adapter_settings(postgres_url, model_dir)
    async with parts_of(settings, renderer, opened.database) as other:
        await (await other.call(opened.token, lane, more)).task
    rows = await opened.turns()
    assert [row.fork_cause for row in rows] == ["sub_agent", None]
    assert rows[0].lane == rows[1].lane


async def test_a_client_that_disconnects_during_its_upload_is_no_failure(
    postgres_url: str, model_dir: Path, database: Database, opened: Opened
) -> None:
    app = create_adapter_app(adapter_settings(postgres_url, model_dir), database)
    headers = [(b"authorization", f"Bearer {opened.token}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    received: list[Any] = [
        {"type": "http.request", "body": b'{"mess', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return received.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    with capture_logs() as logs:
        await app(scope, receive, send)
    assert [log for log in logs if log["log_level"] == "error"] == []
    assert sent[0]["status"] == 400 and await opened.turns() == []
