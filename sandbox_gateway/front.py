"""One address for the boxes of the gateways of several hosts.

A box's id names its host (`host_tag`). A new box is asked for at one host after the other until one has room for it and
has its image. The idempotency key decides the order, and the newest keys' hosts are known: a repeated call begins at
the host of its box, and fails while that host may have the box and cannot say so. The hosts are in a file, name → URL,
that is read every second, when each of them is asked, too. Until it has been read once, every call is answered by 504.
Nothing but calls about its boxes waits for a silent host, and only such a call proves that a box is gone.

| a host                   | calls about its boxes are          | a listing     | it becomes                           |
|--------------------------|------------------------------------|---------------|--------------------------------------|
| ready: it answered       | passed on                          | has its boxes | silent, if it does not answer        |
| silent; all are at first | answered by 504: the boxes may run | names it      | ready, or after `lost_seconds` lost  |
| lost                     | answered as those about gone boxes | leaves it out | ready, with the boxes that are left  |
"""

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from sandbox_gateway.app import ERRORS, box_and_port, health, on_error, on_failure
from sandbox_gateway.connect_protocol import read_body
from sandbox_gateway.control_plane import PAGE_SIZE_MAX, no_such_box
from sandbox_gateway.port_proxy import EXCHANGE_ERRORS, NOT_PASSED_ON, Exchange
from sandbox_gateway.settings import SILENT_HOSTS
from sandbox_gateway.wire_errors import RETRY_AFTER, BoxNotFoundError, RefusalError, unsupported

_TAG_LENGTH = 6
_LOOK_SECONDS, _ANSWER_SECONDS = 1.0, 10.0
_MAX_KEYS = 10_000
_ALL, _ONE = re.compile(r"(/v2)?/sandboxes"), re.compile(r"(?:/v2)?/sandboxes/([^/]+)(?:/.*)?")
_DROPPED = NOT_PASSED_ON - {b"upgrade"}  # which a gateway refuses in words
_OF_CREATE, _OF_ANSWER = ("x-api-key", "idempotency-key"), ("content-type", "retry-after", "should-retry")
_REFUSED_HERE = (404, 503, 504)
"""Statuses with which a gateway says that it does not have the image, no room, or boxes that it cannot reach."""

_log = structlog.get_logger(__name__)


def host_tag(name: str) -> str:
    """Return the letters with which the ids of a host's boxes begin, after their `i`."""
    return hashlib.sha256(name.encode()).hexdigest()[:_TAG_LENGTH]


class Host:
    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.silent_since: float | None = time.monotonic()  # the first look without an answer; None: it is ready
        self.looking: asyncio.Task[None] | None = None

    def begin_look(self, http: httpx.AsyncClient) -> None:
        """Ask the gateway if it answers, unless it is being asked."""
        if self.looking is None or self.looking.done():
            self.looking = asyncio.create_task(self._look(http))

    async def _look(self, http: httpx.AsyncClient) -> None:
        try:
            answers = (await http.get(f"{self.url}/health")).is_success
        except (httpx.HTTPError, httpx.InvalidURL):
            answers = False
        if answers is not (self.silent_since is None):
            self.silent_since = None if answers else time.monotonic()
            _log.info("host_of_boxes", host=self.name, answers=answers)

    async def pass_on(self, request: Request) -> Response:
        """Make the call at the gateway. Raises RefusalError 504 if it does not answer."""
        address, connection = urlsplit(self.url), socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (address.hostname, address.port))
            return await Exchange(connection).run(request, _DROPPED)
        except EXCHANGE_ERRORS as error:
            connection.close()
            raise self.no_answer() from error

    def no_answer(self) -> RefusalError:
        return RefusalError(504, f"the gateway of host {self.name} does not answer; its boxes may run on", RETRY_AFTER)


class Front:
    """The ASGI app. `_placed`: idempotency key → name of the host that may have its box, of the newest keys."""

    def __init__(self, hosts_file: Path, lost_seconds: float) -> None:
        self._hosts_file = hosts_file
        self._lost_seconds = lost_seconds
        self._hosts: dict[str, Host] = {}  # by tag
        self._is_read = False
        self._placed: dict[str, str] = {}
        unbounded = httpx.Limits(max_connections=None)  # callers bound the boots at once, and no look waits for them
        self._http = httpx.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False, limits=unbounded)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._serve(Request(scope, receive))
        await response(scope, receive, send)

    async def follow_hosts(self) -> None:
        """Look at the hosts of the file until cancelled; those that have left it are forgotten."""
        while True:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it cannot be read now
                named = json.loads(await asyncio.to_thread(self._hosts_file.read_bytes))
                known = {(host.name, host.url): host for host in self._hosts.values()}
                self._hosts = {host_tag(one[0]): known.get(one) or Host(*one) for one in named.items()}
                self._is_read = True
            for host in self._hosts.values():
                host.begin_look(self._http)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _serve(self, request: Request) -> Response:
        path = request.url.path
        if not self._is_read and path != "/health":
            raise RefusalError(504, "the file of the hosts of boxes has not been read yet", RETRY_AFTER)
        if (target := box_and_port(request)) is not None:
            return await self._host_of(target[0]).pass_on(request)
        if path == "/health":
            return await health(request)
        if _ALL.fullmatch(path) and request.method == "GET":
            return await self._list(request)
        if _ALL.fullmatch(path) and request.method == "POST":
            return await self._create(request)
        if (one := _ONE.fullmatch(path)) is None:
            raise RefusalError(404, unsupported(f"{request.method} {path[:200]}", "name the box in E2b-Sandbox-Id"))
        try:
            return await self._host_of(one[1]).pass_on(request)
        except BoxNotFoundError as error:
            raise no_such_box(one[1]) from error

    def _host_of(self, box_id: str) -> Host:
        """Return the host of a box. Raises BoxNotFoundError if it is lost or unknown, RefusalError if it is silent."""
        host = self._hosts.get(box_id[1 : 1 + _TAG_LENGTH])
        if host is not None and host in self._silent():
            raise host.no_answer()
        if host is None or host.silent_since is not None:
            raise BoxNotFoundError(box_id)
        return host

    def _ready(self) -> list[Host]:
        if not (ready := [host for host in self._hosts.values() if host.silent_since is None]):
            raise RefusalError(504, "no host of boxes answers", RETRY_AFTER)
        return ready

    def _silent(self) -> list[Host]:
        since = time.monotonic() - self._lost_seconds  # those that are silent for longer are lost
        return [host for host in self._hosts.values() if host.silent_since is not None and host.silent_since > since]

    async def _create(self, request: Request) -> Response:
        """Make a box. Raises RefusalError 504 if a silent host may have the key's box, or alone has the image."""
        body, key = await read_body(request), request.headers.get("idempotency-key") or secrets.token_hex()
        headers = {name: request.headers[name] for name in _OF_CREATE if name in request.headers}
        placed = self._placed.get(key)
        if (own := next((host for host in self._silent() if host.name == placed), None)) is not None:
            raise own.no_answer()
        order = sorted(self._ready(), key=lambda host: hashlib.sha256(f"{key} {host.name}".encode()).digest())
        order.sort(key=lambda host: host.name != placed)  # the first may have room again
        refusal: Response | None = None
        for host in order:
            if host.silent_since is not None:  # since the order was made
                continue
            self._placed[key] = host.name  # also if its answer does not come
            if len(self._placed) > _MAX_KEYS:
                del self._placed[next(iter(self._placed))]
            call = self._http.post(host.url + request.url.path, content=body, headers=headers, timeout=None)
            making = asyncio.ensure_future(call)
            while not making.done() and host.silent_since is None:
                await asyncio.wait((making,), timeout=_LOOK_SECONDS)
            if making.cancel():  # boots that wait for a silent host would take the places of others
                raise host.no_answer()
            try:
                reply = making.result()
            except httpx.HTTPError as error:
                raise host.no_answer() from error
            kept = {name: reply.headers[name] for name in _OF_ANSWER if name in reply.headers}
            answer = Response(reply.content, reply.status_code, kept)
            if reply.status_code not in _REFUSED_HERE or (reply.status_code == 504 and host.name == placed):
                return answer
            self._placed.pop(key, None)
            if refusal is None or refusal.status_code == 404:  # a host that has the image may have room later
                refusal = answer
        if refusal is None or (refusal.status_code == 404 and self._silent()):
            raise (*self._silent(), *order)[0].no_answer()
        return refusal

    async def _list(self, request: Request) -> Response:
        """Return the boxes of all hosts that answer on one page, whose header SILENT_HOSTS names the others."""
        ready, query = self._ready(), {**request.query_params, "limit": str(PAGE_SIZE_MAX)}
        ask = partial(self._http.get, params=query, headers={"X-API-KEY": request.headers.get("x-api-key", "")})
        asked = await asyncio.gather(*(ask(host.url + request.url.path) for host in ready), return_exceptions=True)
        replies = [one for one in asked if isinstance(one, httpx.Response) and one.status_code < 500]
        if refused := [reply for reply in replies if not reply.is_success]:
            return Response(refused[0].content, refused[0].status_code, media_type="application/json")
        silent = [*self._silent(), *(host for host, one in zip(ready, asked, strict=True) if one not in replies)]
        if not replies:
            raise silent[0].no_answer()
        rows: list[dict[str, Any]] = [row for reply in replies for row in reply.json()]
        rows.sort(key=lambda row: str(row["startedAt"]), reverse=query.get("order") != "asc")
        return JSONResponse(rows, headers={SILENT_HOSTS: ", ".join(host.name for host in silent)})


def create_front_app(hosts_file: Path, lost_seconds: float) -> Starlette:
    """Return the app of a front. `lost_seconds`: time without an answer after which a host is lost."""
    front = Front(hosts_file, lost_seconds)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(front.follow_hosts())
        yield
        following.cancel()

    handlers = {**dict.fromkeys(ERRORS, on_error), Exception: on_failure}
    return Starlette(routes=[Mount("/", front)], exception_handlers=handlers, lifespan=lifespan)
