"""The only HTTP client of vLLM: tokens in and out, pause and resume, the weight update, a probe of its routes.

vLLM's HTTP interface is not stable, so it is used in this file only, which also turns its failures into our errors.

    failure                                         error
    cannot connect, connection lost, 5xx, 408, 429  EngineUnavailableError
    any other 4xx, an answer in an unknown form     EngineRejectedError
    a route missing from /openapi.json              MachineError, naming it
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Self
from uuid import uuid4

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson

from engine.generate_request import IdsText, Sampling, generate_body
from engine.generation import Generation, SampledTokens
from ratchet import tracing
from ratchet.errors import EngineRejectedError, EngineUnavailableError, MachineError
from ratchet.lora_slots import FIRST_SLOT, slot_name
from ratchet.types import JsonObject

GENERATE = "/inference/v1/generate"
ABORT = "/abort_requests"
ROUTES = (
    GENERATE,
    ABORT,
    "/health",
    "/pause",
    "/resume",
    "/is_paused",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_info",
)
_WORKERS = "/collective_rpc"
"""Calls a method of every worker. It is not in ROUTES, since an update succeeds without it."""
_CHECK_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_KEPT_SECONDS = 2.0
"""The time for which an idle connection is kept. uvicorn closes it after 5 s, and a call could use a closing one."""
_PIECES_FROM_BYTES = 1 << 20
"""Larger bodies are written in pieces, so that one does not hold the event loop; aiohttp warns of one that is not."""


class EngineClient:
    """Client of one vLLM server, safe to share in an event loop. Calls raise as in the table above."""

    def __init__(self, address: str, timeout_seconds: float = 30) -> None:
        """`address`: http://host:port. `timeout_seconds`: time limit of calls that have none of their own."""
        self.address = address.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._open_session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._open_session is not None:
            await self._open_session.close()

    def _session(self) -> aiohttp.ClientSession:
        """The session, opened with the first call, because it belongs to the event loop that runs then."""
        if self._open_session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS)
            self._open_session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._open_session

    async def generate(
        self,
        ids: Sequence[int] | npt.NDArray[np.int32] | IdsText,
        sampling: Sampling,
        request_id: str,
        version: str | None = None,
        sampled: SampledTokens | None = None,
        slot: int = FIRST_SLOT,
    ) -> Generation:
        """Sample one continuation of `ids`, without a time limit; cancelling the task makes vLLM abort the request.

        `version` salts the prefix cache, so that blocks computed with other weights are never shared. `sampled`: the
        output so far, which this call continues. `slot`: of the adapter that answers.
        """
        prompt = ids if isinstance(ids, IdsText) else IdsText.of(ids)
        content = generate_body(prompt, sampling, request_id, version, slot=slot)
        sampled = sampled or SampledTokens()
        async with self._request("POST", GENERATE, content) as reply:
            await self._add_whole(reply, sampled)
        return sampled.generation()

    async def stream(
        self,
        ids: IdsText,
        sampling: Sampling,
        request_id: str,
        version: str | None,
        sampled: SampledTokens,
        slot: int = FIRST_SLOT,
    ) -> None:
        """Sample as `generate` does, adding tokens to `sampled` as they come; those before a failure stay there."""
        content = generate_body(ids, sampling, request_id, version, stream=True, slot=slot)
        async with self._request("POST", GENERATE, content) as reply:
            if reply.status >= 400 or reply.content_type != "text/event-stream":  # an engine may answer in one piece
                await self._add_whole(reply, sampled)
                return
            await self._read_events(reply, sampled)
        if sampled.finish_reason is None:
            raise EngineUnavailableError(f"engine {self.address}{GENERATE}: the stream ended before the output did")

    async def _add_whole(self, reply: aiohttp.ClientResponse, sampled: SampledTokens) -> None:
        answer = self._json_of(GENERATE, reply.status, await reply.read())
        with self._known_form():
            sampled.add(answer)

    async def _read_events(self, reply: aiohttp.ClientResponse, sampled: SampledTokens) -> None:
        rest = b""
        async for data in reply.content.iter_any():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                value = event.removeprefix(b"data: ")
                if value == b"[DONE]":
                    continue
                with self._known_form():
                    chunk = orjson.loads(value)
                    if "error" in chunk:
                        raise self._error_of(GENERATE, int(chunk["error"].get("code") or 500), str(chunk["error"]))
                    sampled.add(chunk)
            sampled.notify()

    async def score(
        self, ids: Sequence[int] | npt.NDArray[np.int32], slot: int = FIRST_SLOT
    ) -> npt.NDArray[np.float32]:
        """Return the logprobs of ids[1:], each given all ids before it, at temperature 1: float32 (len(ids) - 1,)."""
        prompt = np.ascontiguousarray(ids, dtype=np.int32)
        sampling = Sampling(max_tokens=1, temperature=1.0).wire() | {"prompt_logprobs": 0}
        body = {"model": slot_name(slot), "token_ids": prompt, "sampling_params": sampling, "stream": False}
        reply = await self._call("POST", GENERATE, body=body, timeout_seconds=600)
        positions = reply.get("prompt_logprobs") or []
        if len(positions) != len(prompt):
            raise EngineRejectedError(f"engine {self.address} scored {len(positions)} of {len(prompt)} prompt tokens")
        return np.array(
            [positions[at][str(token)]["logprob"] for at, token in enumerate(prompt.tolist()) if at], np.float32
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort calls by id; unknown ids are ignored. An empty list is not sent: vLLM would abort all."""
        if request_ids:
            own_ids = [f"generate-tokens-{one}" for one in request_ids]  # vLLM's names of calls on the token route
            await self._call("POST", ABORT, body={"request_ids": own_ids})

    async def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """Pause generation. `keep` keeps requests; `clear_cache` computes caches anew at `resume`, for new weights."""
        await self._call("POST", "/pause", params={"mode": mode, "clear_cache": "true" if clear_cache else "false"})

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def is_paused(self) -> bool:
        return bool((await self._call("GET", "/is_paused"))["is_paused"])

    async def init_weight_transfer(self, root: str | None = None, adapter: Path | None = None) -> None:
        """Set the root directory of published policies. May be called again at any time.

        `adapter`: the directory from which the server reads the first slot's adapter. None keeps the current `root` or
        `adapter`.
        """
        info = {"root": root, "adapter": None if adapter is None else str(adapter)}
        await self._call("POST", "/init_weight_transfer_engine", body={"init_info": info}, timeout_seconds=300)

    async def check_files(self, files: Sequence[str], sha256: Sequence[str], limit_seconds: float = 1800) -> bool:
        """Let every worker compare the digests of `files` while calls go on, so that the update itself need not.

        Only for a vLLM with `engine/vllm_worker_extension.py`: an unknown method puts its workers out of step. Return
        False if they have not ended after `limit_seconds`, or do not answer. Raises EngineUnavailableError with the
        reason of a worker that would refuse the update.
        """
        arguments = [uuid4().hex, list(files), list(sha256)]
        end = asyncio.get_running_loop().time() + limit_seconds
        while asyncio.get_running_loop().time() < end:
            try:
                answer = await self._call("POST", _WORKERS, {"method": "check_weight_files", "args": arguments})
                checks = [(one["done"], one["error"]) for one in answer["results"]]
            except (EngineUnavailableError, EngineRejectedError, KeyError, TypeError):
                return False
            for _, error in checks:
                if error is not None:
                    raise EngineUnavailableError(f"engine {self.address} would refuse the update: {error}")
            if checks and all(done for done, _ in checks):
                return True
            await asyncio.sleep(_CHECK_POLL_SECONDS)
        return False

    async def start_update(self) -> None:
        """Start a weight update; vLLM refuses it if one is open."""
        await self._call("POST", "/start_weight_update")

    async def update(self, files: Sequence[str], sha256: Sequence[str], slot: int = FIRST_SLOT) -> None:
        """Load safetensors `files`, relative to the root, after checking all digests. `slot`: in which an adapter is
        placed.

        On a mismatch the weights stay as they are, the update is closed, and EngineUnavailableError has vLLM's reason.
        """
        info = {"files": list(files), "sha256": list(sha256), "slot": slot}
        await self._call("POST", "/update_weights", body={"update_info": info}, timeout_seconds=1800)

    async def finish_update(self, version: str | None) -> None:
        """Close the update and label the weights `version`; None keeps the label."""
        await self._call("POST", "/finish_weight_update", body={"weight_version": version}, timeout_seconds=600)

    async def set_version(self, version: str) -> None:
        """Label the weights without changing them."""
        await self._call("POST", "/update_weight_version", body={"new_version": version})

    async def version(self) -> str | None:
        """Return the label of the weights, or None if they have none."""
        label = (await self._call("GET", "/weight_info")).get("weight_version")
        return None if label in (None, "default") else str(label)

    async def health(self) -> bool:
        """Return whether the server answers and its engine lives."""
        try:
            await self._call("GET", "/health", timeout_seconds=10)
        except (EngineUnavailableError, EngineRejectedError):
            return False
        return True

    async def probe(self, slots: Sequence[int] = (FIRST_SLOT,)) -> None:
        """Check that the server has every route of ROUTES and serves a model by every name that calls have.

        Raises MachineError naming the first route that is missing, or the names that it serves instead.
        """
        paths = (await self._call("GET", "/openapi.json")).get("paths", {})
        for route in ROUTES:
            if route not in paths:
                raise MachineError(
                    f"the engine at {self.address} has no route {route}; start it with `ratchet part engine` "
                    "(vLLM 0.32 with --enable-scale-out and VLLM_SERVER_DEV_MODE=1)"
                )
        served = [one["id"] for one in (await self._call("GET", "/v1/models"))["data"]]
        for name in map(slot_name, slots):
            if name not in served:
                raise MachineError(
                    f"engine {self.address} serves {', '.join(served) or 'no model'}, but calls ask for {name}; "
                    f"start it with --served-model-name {name}"
                )

    @contextmanager
    def _known_form(self) -> Iterator[None]:
        """Raise EngineRejectedError for an output that is not in vLLM's form."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineRejectedError(
                f"engine {self.address} answered {GENERATE} in an unknown form: {error!r}"
            ) from error

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        content: bytes | None,
        params: dict[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request. `timeout_seconds`: for which the engine may send nothing; None: any time."""
        headers = {"content-type": "application/json"} if content is not None else {}
        if path == GENERATE:
            headers |= tracing.trace_headers()
        else:  # after an internal error, uvicorn closes a connection that it has just kept alive
            headers["connection"] = "close"
        timeout = aiohttp.ClientTimeout(connect=_CONNECT_SECONDS, sock_read=timeout_seconds)  # DNS, too
        data = content if content is None or len(content) <= _PIECES_FROM_BYTES else BytesIO(content)
        try:
            async with self._session().request(
                method, self.address + path, data=data, params=params, headers=headers, timeout=timeout
            ) as reply:
                yield reply
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailableError(f"engine {self.address}{path}: {error!r}") from error

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        params: dict[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> JsonObject:
        """Send a request and return its JSON object."""
        content = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        async with self._request(method, path, content, params, limit) as reply:
            return self._json_of(path, reply.status, await reply.read())

    def _error_of(self, path: str, status: int, text: str) -> EngineUnavailableError | EngineRejectedError:
        if status >= 500 or status in (408, 429):
            return EngineUnavailableError(f"engine {self.address}{path} answered {status}: {text[:500]}")
        return EngineRejectedError(f"engine {self.address}{path} refused ({status}): {text[:500]}")

    def _json_of(self, path: str, status: int, content: bytes) -> JsonObject:
        """Return the JSON object of a reply, empty if there is none."""
        if status >= 400:
            raise self._error_of(path, status, content.decode(errors="replace"))
        if not content:
            return {}
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            text = content[:200].decode(errors="replace")
            raise EngineRejectedError(f"engine {self.address}{path} answered no JSON: {text}") from error
        return answer if isinstance(answer, dict) else {}
