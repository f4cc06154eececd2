"""A scripted engine: a process with the part of vLLM's HTTP API that we use, and answers that a test sets.

A real engine does not die, pause or hold calls on demand. Run as `python -m tests.standins.engine PORT [HOST [SLOTS]]`,
with a number of slots as an engine with LoRA.

    POST /script {"outputs": [{"ids": [...], "finish": "stop", "hold": "name", "die": false, "status": 200,
                               "logprobs": [...], "at": 0, "experts": true}]}
                                        "at": number of streamed tokens before the hold or the death
                                        "tell": ["name", ...] instead of "ids": a token after the end of each hold, its
                                        id is the step whose files the call's slot has
                                        "experts": return those of `experts_of`
    POST /script {"scores": [...], "update": "die" | "refuse" | "hold" | "refuse check", "pause": "die"}
                                        prompt logprobs; how weight updates and pauses end
    POST /release {"hold": "name"}      ends the hold of calls
    POST /reset                         restores the initial state, but keeps the label of the weights, which the
                                        engine's row names
    POST /restart                       restores all of it, as an engine that is started anew
    GET  /calls                         all generate requests in order, pauses, weight updates, the NCCL group to join
"""

import asyncio
import os
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.client import ROUTES
from ratchet.lora_slots import FIRST_SLOT, slot_name


def experts_of(ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """Return the experts of these tokens in 3 layers, (tokens, 3, 2): each token always has the same."""
    layers = np.arange(3, dtype=np.int64)[:, None]
    return ((np.asarray(ids, np.int64)[:, None, None] + 5 * layers + np.arange(2)) % 251).astype(np.uint8)


def _npy(array: npt.NDArray[np.uint8]) -> str:
    buffer = BytesIO()
    np.save(buffer, array)
    return b64encode(buffer.getvalue()).decode()


class Engine:
    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self.steps: dict[str, int] = {}  # name of the slot -> step of the files that it was given last
        self.outputs: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.holds: dict[str, asyncio.Event] = {}
        self.running = asyncio.Event()
        self.running.set()
        self.version = "default"
        self.scores: list[float] = []
        self.update_ends = self.pause_ends = ""
        self.pauses: list[dict[str, str]] = []
        self.updates: list[dict[str, Any]] = []
        self.checks: list[list[list[str]]] = []

    async def script(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.outputs += body.get("outputs", [])
        self.scores = body.get("scores", self.scores)
        self.update_ends = body.get("update", "")
        self.pause_ends = body.get("pause", "")
        for output in body.get("outputs", []):
            if output.get("hold"):
                self.holds.setdefault(output["hold"], asyncio.Event())
        return Response()

    async def reset(self, request: Request) -> Response:
        label = self.version
        response = await self.restart(request)
        self.version = label
        return response

    async def restart(self, request: Request) -> Response:
        for hold in self.holds.values():
            hold.set()
        self.__init__(self.num_slots)  # type: ignore[misc]
        return Response()

    async def release(self, request: Request) -> Response:
        self.holds.setdefault(orjson.loads(await request.body())["hold"], asyncio.Event()).set()
        return Response()

    async def seen(self, request: Request) -> Response:
        seen = {
            "calls": self.calls,
            "aborted": self.aborted,
            "pauses": self.pauses,
            "updates": self.updates,
            "checks": self.checks,
        }
        return Response(orjson.dumps(seen), media_type="application/json")

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        if body["sampling_params"].get("prompt_logprobs") is not None:
            return self._score(body["token_ids"])
        call = {"request_id": body.get("request_id"), "ids": body["token_ids"], "sampling": body["sampling_params"]}
        if set(body.get("cache_salt") or "") & set("@/\\\0"):  # as vLLM does
            return JSONResponse({"error": {"message": "Parameter 'cache_salt' must not contain '@', '/'"}}, 400)
        call |= {"model": body["model"]}
        self.calls.append(call | {"salt": body.get("cache_salt"), "traceparent": request.headers.get("traceparent")})
        output: dict[str, Any] = self.outputs.pop(0) if self.outputs else {"ids": [1], "finish": "length"}
        if body.get("stream") and output.get("status", 200) == 200:
            return StreamingResponse(self._stream(body, output), media_type="text/event-stream")
        if "tell" in output:
            return JSONResponse({"request_id": body.get("request_id"), "choices": [await self._tell(output, body)]})
        await self._act(output)
        if output.get("status", 200) != 200:
            return JSONResponse({"error": {"message": "scripted"}}, output["status"])
        return JSONResponse({"request_id": body.get("request_id"), "choices": [self._choice(output, body)]})

    async def _act(self, output: dict[str, Any]) -> None:
        if output.get("die"):
            os._exit(9)
        if output.get("hold"):
            await self.holds[output["hold"]].wait()
        await self.running.wait()

    async def _tell(self, output: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        """Sample token by token, each with what the slot has then."""
        ids: list[int] = []
        spans: list[dict[str, Any]] = []
        for hold in output["tell"]:
            await self.holds.setdefault(hold, asyncio.Event()).wait()
            await self.running.wait()
            ids.append(self.steps.get(body["model"], 0))
            if spans and spans[-1]["version"] == self.version:
                spans[-1]["end"] = len(ids)
            else:
                spans.append({"version": self.version, "start": len(ids) - 1, "end": len(ids)})
        return self._choice({"ids": ids}, body) | {"weight_versions": spans}

    async def _stream(self, body: dict[str, Any], output: dict[str, Any]) -> AsyncIterator[bytes]:
        """The output token by token, as vLLM streams it: finish reason, versions and experts come with the last
        chunk.
        """
        choice = self._choice(output, body)
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        for at in range(len(ids) + 1):
            if at == output.get("at", 0):
                await self._act(output)
            one = {"index": 0, "token_ids": ids[at : at + 1], "logprobs": {"content": content[at : at + 1]}}
            end = choice["finish_reason"] if at == len(ids) else None
            spans = choice["weight_versions"] if at == len(ids) else None
            one |= {"routed_experts": choice["routed_experts"]} if at == len(ids) else {}
            one |= {"finish_reason": end, "weight_versions": spans}
            chunk = {"request_id": body.get("request_id"), "choices": [one]}
            yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _choice(self, output: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        ids = output["ids"]
        computed = [*body["token_ids"], *ids][body["sampling_params"]["routed_experts_prompt_start"] : -1]
        logprobs = output.get("logprobs", [-1.0] * len(ids))  # as many as given
        content = [
            {"token_id": one, "logprob": logprob, "rank": 1} for one, logprob in zip(ids, logprobs, strict=False)
        ]
        return {
            "index": 0,
            "token_ids": ids,
            "finish_reason": output.get("finish", "stop"),
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "routed_experts": _npy(experts_of(computed)) if output.get("experts") else None,
        }

    def _score(self, ids: list[int]) -> Response:
        positions = [{str(token): {"logprob": score}} for token, score in zip(ids[1:], self.scores, strict=True)]
        choice = {"index": 0, "token_ids": [1], "finish_reason": "length", "logprobs": None}
        return JSONResponse({"choices": [choice], "prompt_logprobs": [None, *positions]})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": slot_name(slot)} for slot in range(1, 1 + max(1, self.num_slots))]})

    async def init_weight_transfer(self, request: Request) -> Response:
        info = orjson.loads(await request.body())["init_info"]
        if unknown := set(info) - {"root", "adapter"}:  # as vLLM does for fields that a back end does not have
            return JSONResponse({"error": {"message": f"unexpected {sorted(unknown)}", "code": 400}}, 400)
        return JSONResponse({})

    async def update_weights(self, request: Request) -> Response:
        self.updates.append(orjson.loads(await request.body())["update_info"])
        if self.update_ends == "die":
            os._exit(9)
        if self.update_ends == "hold":
            await self.holds.setdefault("update", asyncio.Event()).wait()
        if self.updates[-1].get("files") and self.update_ends != "refuse":
            step = self.updates[-1]["files"][0].split("/")[-2].partition(".")[0]
            self.steps[slot_name(self.updates[-1].get("slot", FIRST_SLOT))] = int(step) if step.isdigit() else 0
        return JSONResponse({"error": "scripted"}, 500) if self.update_ends == "refuse" else JSONResponse({})

    async def workers(self, request: Request) -> Response:
        """As two workers that compare digests: at the first call of the same files they are at work."""
        body = orjson.loads(await request.body())
        if self.checks[-1:] != [body["args"]]:
            self.checks.append(body["args"])
            return JSONResponse({"results": [{"done": True, "error": None}, {"done": False, "error": None}]})
        error = "scripted" if self.update_ends == "refuse check" else None
        return JSONResponse({"results": [{"done": True, "error": None}, {"done": True, "error": error}]})

    async def finish_update(self, request: Request) -> Response:
        self.version = orjson.loads(await request.body())["weight_version"] or self.version
        return JSONResponse({})

    async def update_version(self, request: Request) -> Response:
        self.version = orjson.loads(await request.body())["new_version"]
        return JSONResponse({})

    async def abort(self, request: Request) -> Response:
        self.aborted += orjson.loads(await request.body())["request_ids"]
        return JSONResponse({})

    async def pause(self, request: Request) -> Response:
        self.pauses.append(dict(request.query_params))
        if self.pause_ends == "die":
            os._exit(9)
        self.running.clear()
        return JSONResponse({})

    async def resume(self, request: Request) -> Response:
        self.running.set()
        return JSONResponse({})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": not self.running.is_set()})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.version})

    async def ok(self, request: Request) -> Response:
        return JSONResponse({})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse({"paths": {route: {} for route in ROUTES}})

    def app(self) -> Starlette:
        post = {
            "/script": self.script,
            "/release": self.release,
            "/reset": self.reset,
            "/restart": self.restart,
            "/inference/v1/generate": self.generate,
            "/abort_requests": self.abort,
            "/pause": self.pause,
            "/resume": self.resume,
            "/init_weight_transfer_engine": self.init_weight_transfer,
            "/start_weight_update": self.ok,
            "/collective_rpc": self.workers,
            "/update_weights": self.update_weights,
            "/finish_weight_update": self.finish_update,
            "/update_weight_version": self.update_version,
        }
        get = {"/calls": self.seen, "/is_paused": self.is_paused, "/health": self.ok, "/openapi.json": self.openapi}
        get |= {"/v1/models": self.models, "/weight_info": self.weight_info}
        routes = [Route(path, handler, methods=["POST"]) for path, handler in post.items()]
        return Starlette(routes=routes + [Route(path, handler) for path, handler in get.items()])


if __name__ == "__main__":
    host = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"
    slots = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    uvicorn.run(Engine(slots).app(), host=host, port=int(sys.argv[1]), log_level="warning")
