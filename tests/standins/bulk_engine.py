"""An engine for load tests: holds each call for a random time, answers with the next of its texts, and records digests
instead of ids.

The scripted engine keeps all prompts, which would fill the memory with a thousand sessions. Run as `python -m
tests.standins.bulk_engine PORT`.

    POST /texts {"outputs": [[id, ...], ...], "hold_seconds": [least, most]}
    GET  /calls     {request id: [digest of the prompt's ids, digest of the answer's, seconds held]}, and `num_calls`
"""

import asyncio
import random
import sys
import time
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def digest_of(ids: Any) -> str:
    return blake2b(np.ascontiguousarray(ids, "<i4").tobytes(), digest_size=8).hexdigest()


class BulkEngine:
    def __init__(self) -> None:
        self.calls: dict[str, tuple[str, str, float]] = {}
        self.replies: list[tuple[str, bytes]] = []
        self.hold_seconds = (0.0, 0.0)
        self.num_calls = 0
        self.random = random.Random(0)

    async def texts(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        if body.get("outputs"):
            self.replies = [(digest_of(ids), _reply(ids)) for ids in body["outputs"]]
        self.hold_seconds = tuple(body["hold_seconds"])
        return Response()

    async def generate(self, request: Request) -> Response:
        data = await request.body()
        arrived = time.monotonic()
        body = orjson.loads(data)
        answer, reply = self.replies[self.num_calls % len(self.replies)]
        self.num_calls += 1
        prompt = digest_of(body["token_ids"])
        await asyncio.sleep(self.random.uniform(*self.hold_seconds))
        self.calls[body["request_id"]] = (prompt, answer, time.monotonic() - arrived)
        return Response(reply, media_type="application/json")

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


def _reply(ids: list[int]) -> bytes:
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


if __name__ == "__main__":
    uvicorn.run(BulkEngine().app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
