"""An orderly stop of an adapter: each client in flight gets an error that it can retry."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.integration.adapter.conftest import Opened, ScriptedEngine, adapter_process, adapter_settings


async def test_a_stop_answers_calls_in_flight_in_the_vendors_form(
    postgres_url: str, model_dir: Path, engine: ScriptedEngine, opened: Opened
) -> None:
    settings = adapter_settings(postgres_url, model_dir)
    await engine.script(*({"ids": engine.ids("lost"), "hold": "gate"} for _ in range(2)))
    async with (
        adapter_process(settings) as process,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{settings.port}", headers={"x-api-key": opened.token}, timeout=300
        ) as http,
    ):

        def ask(question: str, stream: bool) -> "asyncio.Task[httpx.Response]":
            messages = [{"role": "user", "content": question}]
            body: dict[str, Any] = {"model": "", "max_tokens": 99, "messages": messages, "stream": stream}
            return asyncio.create_task(http.post("/v1/messages", json=body))

        plain, streamed = ask("one", stream=False), ask("two", stream=True)
        await engine.wait_for_calls(2)
        process.send_signal(signal.SIGTERM)
        reply = await plain
        events = (await streamed).text
    assert (reply.status_code, reply.headers["retry-after"]) == (529, "1")
    assert "restarting" in reply.json()["error"]["message"]
    assert "event: error" in events and "restarting" in events
    assert {row.state for row in await opened.turns()} == {"in_flight"}
