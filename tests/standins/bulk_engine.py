"""An engine for load tests: holds each call for a random time, answers with the next of its texts, and records digests
instead of ids.

The scripted engine keeps all prompts, which would fill the memory with a thousand sessions. Run as `python -m
tests.standins.bulk_engine PORT`.

    POST /texts {"outputs": [[id, ...], ...], "hold_seconds": [least, most], "token_seconds": 0}
    GET  /calls     {request id: [digest of the prompt's ids, digest of the answer's, seconds held]}, and `num_calls`
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

TOKENS_PER_CHUNK = 8


def digest_of(ids: Any) -> str:
    return blake2b(np.ascontiguousarray(ids, "<i4").tobytes(), digest_size=8).hexdigest()


class BulkEngine:
    def __init__(self) -> None:
        self.calls: dict[str, tuple[str, str, float]] = {}
        self.replies: list[tuple[str, bytes]] = []
        self.streams: list[list[bytes]] = []
        self.token_seconds = 0.0
        self.hold_seconds = (0.0, 0.0)
        self.num_calls = 0
        self.random = random.Random(0)

    async def texts(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        if body.get("outputs"):
            self.replies = [(digest_of(ids), as_reply(ids)) for ids in body["outputs"]]
            self.streams = [as_stream(ids) for ids in body["outputs"]]
        self.hold_seconds = tuple(body["hold_seconds"])
        self.token_seconds = body.get("token_seconds", 0.0)
        return Response()

    async def generate(self, request: Request) -> Response:
        data = await request.body()
        arrived = time.monotonic()
        body = orjson.loads(data)
        number = self.num_calls % len(self.replies)
        answer, reply = self.replies[number]
        self.num_calls += 1
        prompt = digest_of(body["token_ids"])
        await asyncio.sleep(self.random.uniform(*self.hold_seconds))
        self.calls[body["request_id"]] = (prompt, answer, time.monotonic() - arrived)
        if body["stream"] and self.token_seconds:
            return StreamingResponse(self._slowly(self.streams[number]), media_type="text/event-stream")
        if body["stream"]:
            return Response(b"".join(self.streams[number]), media_type="text/event-stream")
        return Response(reply, media_type="application/json")

    async def _slowly(self, events: list[bytes]) -> AsyncIterator[bytes]:
        for number, event in enumerate(events):
            await asyncio.sleep(self.token_seconds * (TOKENS_PER_CHUNK if number else 1))
            yield event

    async def seen(self, request: Request) -> Response:
        return Response(orjson.dumps({"num_calls": self.num_calls, "calls": self.calls}))

    async def health(self, request: Request) -> Response:
        return Response(b"{}")

    def app(self) -> Starlette:
        post = [
            Route("/texts", self.texts, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
        ]
        return Starlette(routes=[*post, Route("/calls", self.seen), Route("/health", self.health)])


def as_reply(ids: list[int]) -> bytes:
    content = [{"token_id": one, "logprob": -0.5, "rank": 1} for one in ids]
    spans = [{"version": "run/0.e1", "start": 0, "end": len(ids)}]
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "weight_versions": spans,
    }
    return orjson.dumps({"request_id": "", "choices": [choice]})


def as_stream(ids: list[int]) -> list[bytes]:
    """The reply in chunks of as many tokens as vLLM is asked for."""
    whole = orjson.loads(as_reply(ids))["choices"][0]
    events = []
    for start in [0, *range(1, len(ids), TOKENS_PER_CHUNK)]:
        end = 1 if start == 0 else min(start + TOKENS_PER_CHUNK, len(ids))
        content = {"content": whole["logprobs"]["content"][start:end]}
        choice = {"index": 0, "token_ids": ids[start:end], "logprobs": content, "finish_reason": None}
        if end == len(ids):
            choice |= {"finish_reason": "stop", "weight_versions": whole["weight_versions"]}
        events.append(b"data: " + orjson.dumps({"request_id": "", "choices": [choice]}) + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]


if __name__ == "__main__":
    uvicorn.run(BulkEngine().app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
