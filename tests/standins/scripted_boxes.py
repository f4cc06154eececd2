"""A sandbox service without sandboxes, for benchmarks of what surrounds them: a process that answers a box's commands.

    python -m tests.standins.scripted_boxes PORT ADAPTER_URL TURNS

The agent is real to the adapter: for each box in which one is started, this process makes TURNS model calls with the
session's token, each with the answers before it. It changes no file, and its hidden tests pass. Workers use it as
RATCHET_SANDBOX_PROVIDER=tests.standins.scripted_boxes:make_provider with SCRIPTED_BOXES=http://127.0.0.1:PORT.
"""

import asyncio
import hashlib
import io
import os
import re
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import httpx
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ratchet.errors import SandboxBusyError, SandboxGoneError
from sandboxes.base import BoxLimits, Capabilities, CommandResult, SandboxInfo, SandboxProvider

URL_VARIABLE = "SCRIPTED_BOXES"
BASE_COMMIT = "0" * 40
_NONCE = re.compile(r"^NONCE='?([0-9a-f]+)'?$", re.M)
_RETRY_SECONDS = 1.0


# ---------------------------------------------------------------- the service


@dataclass
class _Box:
    id: str
    metadata: dict[str, str]
    started: float = field(default_factory=time.time)
    token: str = ""
    nonce: str = ""
    agent: "asyncio.Task[None] | None" = None

    def row(self) -> dict[str, Any]:
        return {"id": self.id, "metadata": self.metadata, "started": self.started}


class ScriptedBoxes:
    def __init__(self, adapter_url: str, num_turns: int) -> None:
        self.adapter_url = adapter_url
        self.num_turns = num_turns
        self.boxes: dict[str, _Box] = {}
        self.by_key: dict[str, str] = {}
        self.num_created = 0
        self.http = httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def create(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        known = self.by_key.get(body["key"])
        if known is None or known not in self.boxes:
            known = self.by_key[body["key"]] = uuid4().hex
            self.boxes[known] = _Box(known, body["metadata"])
            self.num_created += 1
        return _json({"id": known})

    async def listed(self, request: Request) -> Response:
        return _json({"boxes": [one.row() for one in self.boxes.values()], "num_created": self.num_created})

    async def described(self, request: Request) -> Response:
        box = self.boxes.get(request.path_params["id"])
        return Response(status_code=404) if box is None else _json(box.row())

    async def kill(self, request: Request) -> Response:
        box = self.boxes.pop(request.path_params["id"], None)
        if box is not None and box.agent is not None:
            box.agent.cancel()
        return _json({"existed": box is not None})

    async def write(self, request: Request) -> Response:
        box = self.boxes.get(request.path_params["id"])
        if box is None:
            return Response(status_code=404)
        data = await request.body()
        if data[257:262] == b"ustar":
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                found = tar.extractfile("token")
                assert found is not None
                box.token = found.read().decode().strip()
        elif (nonce := _NONCE.search(data.decode(errors="replace"))) is not None:
            box.nonce = nonce[1]
        return _json({})

    async def execute(self, request: Request) -> Response:
        box = self.boxes.get(request.path_params["id"])
        if box is None:
            return Response(status_code=404)
        return _json({"stdout": await self._output(box, (await request.body()).decode())})

    async def _output(self, box: _Box, command: str) -> str:
        if "commit -q --no-verify" in command:
            return BASE_COMMIT + "\n"
        if "launcher.sh start" in command:
            box.agent = box.agent or asyncio.create_task(self._work(box.token))
        elif "launcher.sh wait" in command:
            assert box.agent is not None
            started = time.monotonic()
            await asyncio.wait({box.agent})
            used = time.monotonic() - started
            record = {"exit_code": 0, "reason": "exit", "started": 0.0, "ended": used, "used_seconds": used}
            return orjson.dumps(record).decode() + "\n"
        elif "GIT_INDEX_FILE" in command:  # the diff: no file has changed
            return f"0 0 {hashlib.sha256().hexdigest()}\n\n"
        elif command.endswith("/run") and box.nonce:
            return f"{box.nonce} log\nok\n{box.nonce} frames\n{box.nonce} end 0 0 1000000 0\n"
        return ""

    async def _work(self, token: str) -> None:
        """Make the agent's model calls. A call is repeated until it is answered, as an agent's SDK does."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": "make it right"}]
        headers = {"authorization": f"Bearer {token}"}
        for number in range(self.num_turns):
            while True:
                try:
                    body = {"model": "policy", "messages": messages}
                    reply = await self.http.post(f"{self.adapter_url}/v1/chat/completions", json=body, headers=headers)
                    if reply.status_code == 401:
                        return  # the session is closed
                    answer = reply.raise_for_status().json()["choices"][0]["message"]["content"]
                    break
                except httpx.HTTPError:
                    headers["x-stainless-retry-count"] = "1"
                    await asyncio.sleep(_RETRY_SECONDS)
            headers.pop("x-stainless-retry-count", None)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"go on {number}"}]

    async def health(self, request: Request) -> Response:
        return _json({})

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/boxes", self.create, methods=["POST"]),
                Route("/boxes", self.listed),
                Route("/boxes/{id}", self.kill, methods=["DELETE"]),
                Route("/boxes/{id}", self.described),
                Route("/boxes/{id}/files", self.write, methods=["POST"]),
                Route("/boxes/{id}/commands", self.execute, methods=["POST"]),
                Route("/health", self.health),
            ]
        )


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


# ---------------------------------------------------------------- the workers' side


class ScriptedBox:
    def __init__(self, http: httpx.AsyncClient, box_id: str) -> None:
        self._http = http
        self._id = box_id

    @property
    def id(self) -> str:
        return self._id

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        check: bool = True,
        timeout: float | None = 60,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_stderr: Callable[[str], None] | None = None,
    ) -> CommandResult:
        found = await _ask(self._http, "POST", f"/boxes/{self._id}/commands", content=cmd.encode())
        return CommandResult(0, found["stdout"], "")

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        await _ask(
            self._http,
            "POST",
            f"/boxes/{self._id}/files",
            content=data.encode() if isinstance(data, str) else data,
        )

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        raise FileNotFoundError(path)

    async def set_ttl(self, seconds: int) -> None:
        return

    async def kill(self) -> None:
        await _ask(self._http, "DELETE", f"/boxes/{self._id}")

    async def close(self) -> None:
        return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.kill()


class ScriptedProvider:
    name = "scripted"
    capabilities = Capabilities(pause=False, network_policy=True, limits=False, max_ttl_seconds=86_400)

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, limits=limits)

    async def create(
        self,
        image: str,
        *,
        ttl_seconds: int,
        metadata: Mapping[str, str],
        idempotency_key: str,
        network: bool = True,
        limits: BoxLimits | None = None,
    ) -> ScriptedBox:
        body = orjson.dumps({"key": idempotency_key, "metadata": dict(metadata)})
        return ScriptedBox(self._http, (await _ask(self._http, "POST", "/boxes", content=body))["id"])

    async def connect(self, sandbox_id: str) -> ScriptedBox:
        return ScriptedBox(self._http, sandbox_id)

    async def kill(self, sandbox_id: str) -> bool:
        return bool((await _ask(self._http, "DELETE", f"/boxes/{sandbox_id}"))["existed"])

    async def describe(self, sandbox_id: str) -> SandboxInfo:
        return _info(await _ask(self._http, "GET", f"/boxes/{sandbox_id}"))

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        found = [_info(one) for one in (await _ask(self._http, "GET", "/boxes"))["boxes"]]
        return [one for one in found if one.carries(metadata)]

    async def close(self) -> None:
        await self._http.aclose()


def _info(one: Mapping[str, Any]) -> SandboxInfo:
    return SandboxInfo(one["id"], one["metadata"], datetime.fromtimestamp(one["started"], UTC), "running")


async def _ask(http: httpx.AsyncClient, method: str, path: str, content: bytes | None = None) -> Any:
    try:
        reply = await http.request(method, path, content=content)
    except httpx.TransportError as error:
        raise SandboxBusyError(f"scripted boxes: {error!r}") from error
    if reply.status_code == 404:
        raise SandboxGoneError(f"there is no box {path}")
    return orjson.loads(reply.raise_for_status().content)


def make_provider() -> SandboxProvider:
    """Return the provider that SCRIPTED_BOXES names."""
    return ScriptedProvider(os.environ[URL_VARIABLE])


if __name__ == "__main__":
    service = ScriptedBoxes(sys.argv[2], int(sys.argv[3]))
    uvicorn.run(service.app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
