"""Time to an answer's first text and to its first tool call's arguments, compared with the time to its last byte, which
is when a client would see both without streaming.

One session, an engine that samples a token every few milliseconds.
"""

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

if TYPE_CHECKING:
    from tests.benchmarks._adapter_load import Agent, Rig

NUM_TURNS = 12
TOKEN_SECONDS = 0.02


async def first_texts(found: "Rig", agent: "Agent") -> dict[str, Any]:
    """Medians over turns, in milliseconds: until the first text, the first arguments, the last byte.

    Each answer has two calls.
    """
    await found.hold(0, 0, token_seconds=TOKEN_SECONDS)
    first, arguments, last = [], [], []
    for _ in range(NUM_TURNS):
        started = time.monotonic()
        seen = await _first_seen(found.adapter_port, agent)
        first.append(1e3 * (seen.text_at - started))
        arguments.append(1e3 * (seen.arguments_at - started))
        last.append(1e3 * (time.monotonic() - started))
    await found.hold(0, 0)
    return {
        "milliseconds_per_token": 1e3 * TOKEN_SECONDS,
        "first_text_ms": round(statistics.median(first)),
        "first_arguments_ms": round(statistics.median(arguments)),
        "last_byte_ms": round(statistics.median(last)),
    }


class _FirstSeen(NamedTuple):
    text_at: float
    arguments_at: float


async def _first_seen(port: int, agent: "Agent") -> _FirstSeen:
    """Ask a question of its own, so that no history grows, and read the stream."""
    question = f"question {len(agent.calls)}"
    agent.calls.append((0.0, 200))
    body = orjson.dumps(
        {
            "model": "policy",
            "max_tokens": 4000,
            "stream": True,
            "tools": [{"name": "Bash", "input_schema": {"type": "object"}}],
            "messages": [{"role": "user", "content": question}],
        }
    )
    head = f"POST /v1/messages HTTP/1.1\r\nhost: adapter\r\nx-api-key: {agent.token}\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    seen = b""
    times: dict[bytes, float] = {}
    while data := await reader.read(1 << 16):
        seen += data
        for mark in (b"text_delta", b"input_json_delta"):
            if mark in seen:
                times.setdefault(mark, time.monotonic())
    writer.close()
    assert b"message_stop" in seen, seen[-300:]
    return _FirstSeen(times[b"text_delta"], times[b"input_json_delta"])
