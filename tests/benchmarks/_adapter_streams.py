"""When a client sees the first text of an answer, compared with its last byte, when it would see it without streaming.

One session, an engine that samples a token every few milliseconds.
"""

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from tests.benchmarks._adapter_load import Agent, Rig

NUM_TURNS = 12
TOKEN_SECONDS = 0.02


async def first_texts(found: "Rig", agent: "Agent") -> dict[str, Any]:
    """Medians over turns, in milliseconds: until the first text, until the last byte."""
    await found.hold(0, 0, token_seconds=TOKEN_SECONDS)
    first, last = [], []
    for _ in range(NUM_TURNS):
        started = time.monotonic()
        at = await _first_text(found.adapter_port, agent)
        first.append(1e3 * (at - started))
        last.append(1e3 * (time.monotonic() - started))
    await found.hold(0, 0)
    return {
        "milliseconds_per_token": 1e3 * TOKEN_SECONDS,
        "first_text_ms": round(statistics.median(first)),
        "last_byte_ms": round(statistics.median(last)),
    }


async def _first_text(port: int, agent: "Agent") -> float:
    """Ask a question of its own, so that no history grows, and read the stream; return when its first text came."""
    question = f"question {len(agent.calls)}"
    agent.calls.append((0.0, 200))
    body = orjson.dumps(
        {"model": "policy", "max_tokens": 4000, "stream": True, "messages": [{"role": "user", "content": question}]}
    )
    head = f"POST /v1/messages HTTP/1.1\r\nhost: adapter\r\nx-api-key: {agent.token}\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    seen = b""
    at = 0.0
    while data := await reader.read(1 << 16):
        seen += data
        if not at and b"text_delta" in seen:
            at = time.monotonic()
    writer.close()
    assert b"message_stop" in seen, seen[-300:]
    return at
