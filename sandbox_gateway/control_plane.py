"""E2B's control plane: create, connect, list, kill, time to live, pause. Older SDKs' paths are aliases."""

import asyncio
import contextlib
import os
import time
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

import psutil
from pydantic import Field, StrictInt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sandbox_gateway.box_client import BoxClient
from sandbox_gateway.box_fleet import CreateRequest, Fleet
from sandbox_gateway.boxd import cgroups
from sandbox_gateway.boxd.protocol import BoxFaultError, clock
from sandbox_gateway.connect_protocol import Body, BodyT, parse, read_body
from sandbox_gateway.settings import GatewaySettings
from sandbox_gateway.wire_errors import BoxNotFoundError, RefusalError, unsupported

ENVD_VERSION = "0.5.7"
"""Decides which features the SDK uses: octet-stream uploads, gzip and close_stdin, but no file metadata."""
PAGE_SIZE_MAX = 1000
_METRICS_FRESH_SECONDS = 60
_CPU_SAMPLE_SECONDS = 0.1

_LOOPBACK, _ALL_TRAFFIC = {"127.0.0.1", "localhost"}, "0.0.0.0/0"
_NETWORK_REMEDY = "leave it out: boxes reach the gateway's egress ports at 127.0.0.1 and nothing else"
_REMEDIES = {
    "snapshots": "copy files with `tar` and files.read, or create a box and repeat the set-up",
    "fork": "create several boxes and repeat the set-up in each",
    "network": _NETWORK_REMEDY,
    "logs": "read the output of your commands",
}
_ALL_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_NO_REMEDY = "use create, connect, list, kill, set_timeout, pause and get_metrics"

TimeoutSeconds = Annotated[StrictInt, Field(ge=0)]


class CreateBody(Body):
    templateID: str = Field(min_length=1)
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None
    timeout: TimeoutSeconds | None = None
    allow_internet_access: bool | None = None
    mcp: Any = None
    iam: Any = None
    volumeMounts: Any = None
    network: Any = None
    autoPause: bool | None = None


class TimeoutBody(Body):
    timeout: TimeoutSeconds | None = None
    duration: TimeoutSeconds | None = None


class ControlPlane:
    def __init__(self, fleet: Fleet, settings: GatewaySettings) -> None:
        self._fleet = fleet
        self._settings = settings

    def routes(self) -> list[Route]:
        found: list[Route] = []
        for prefix in ("", "/v2"):
            top, one = f"{prefix}/sandboxes", f"{prefix}/sandboxes/{{box_id}}"
            found += [
                Route(top, self.create, methods=["POST"]),
                Route(top, self.list, methods=["GET"]),
                Route(one, self.detail, methods=["GET"]),
                Route(one, self.kill, methods=["DELETE"]),
                Route(f"{one}/connect", self.connect, methods=["POST"]),
                Route(f"{one}/resume", self.connect, methods=["POST"]),
                Route(f"{one}/timeout", self.set_timeout, methods=["POST"]),
                Route(f"{one}/refreshes", self.refresh, methods=["POST"]),
                Route(f"{one}/pause", self.pause, methods=["POST"]),
                Route(f"{one}/metrics", self.metrics, methods=["GET"]),
                Route(f"{one}/{{operation:path}}", self.refuse_operation, methods=_ALL_METHODS),
            ]
        return found

    async def create(self, request: Request) -> Response:
        body = await _read(request, CreateBody)
        for name in ("mcp", "iam", "volumeMounts", "autoPause"):
            if getattr(body, name):
                raise RefusalError(400, unsupported(name, "leave it out"))
        if body.allow_internet_access:
            raise RefusalError(400, unsupported("allow_internet_access", _NETWORK_REMEDY))
        if body.network and not _is_already_so(body.network):
            raise RefusalError(400, unsupported("network", _NETWORK_REMEDY))
        metadata, env = body.metadata or {}, body.envVars or {}
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise RefusalError(400, f"envVars: {name!r} cannot be an environment variable")
        box = await self._fleet.create(
            CreateRequest(
                template=metadata.get(self._settings.image_metadata_key) or body.templateID,
                metadata=metadata,
                env=env,
                ttl_seconds=self._ttl(body.timeout),
                idempotency_key=request.headers.get("idempotency-key"),
                network=body.allow_internet_access is not False,
            )
        )
        return JSONResponse(self._sandbox(box), 201)

    async def connect(self, request: Request) -> Response:
        """Resume a paused box and move its end to a later time, never to an earlier one."""
        body, box = await _read(request, TimeoutBody), self._box(request)
        resumed = box.record.state == "paused"
        if resumed:
            await self._fleet.set_paused(box, False)
        deadline = clock() + self._ttl(body.timeout)
        if deadline > box.record.deadline:
            await self._fleet.set_deadline(box, deadline)
        return JSONResponse(self._sandbox(box), 201 if resumed else 200)

    async def set_timeout(self, request: Request) -> Response:
        body, box = await _read(request, TimeoutBody), self._box(request)
        await self._fleet.set_deadline(box, clock() + self._ttl(body.timeout))
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        body, box = await _read(request, TimeoutBody), self._box(request)
        await self._fleet.set_deadline(box, max(box.record.deadline, clock() + self._ttl(body.duration)))
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        await read_body(request)
        box = self._box(request)
        if box.record.state == "paused":
            raise RefusalError(409, f"sandbox '{box.id}' is already paused")
        await self._fleet.set_paused(box, True)
        return Response(status_code=204)

    async def kill(self, request: Request) -> Response:
        box = self._box(request)
        if not await self._fleet.kill(box):
            raise no_such_box(box.id)
        return Response(status_code=204)

    async def refuse_operation(self, request: Request) -> Response:
        operation = request.path_params["operation"]
        self._box(request)
        raise RefusalError(501, unsupported(f"{operation} of a sandbox"[:200], _REMEDIES.get(operation, _NO_REMEDY)))

    async def detail(self, request: Request) -> Response:
        return JSONResponse(self._detail(self._box(request)))

    async def metrics(self, request: Request) -> Response:
        """Return one sample taken now. Nothing is recorded, so a range in the past is empty."""
        box = self._box(request)
        end = _moment(request.query_params.get("end"))
        if end and end < time.time() - _METRICS_FRESH_SECONDS:
            return JSONResponse([])
        sample = await _take_sample(box)
        return JSONResponse([{"timestamp": _iso(time.time()), "timestampUnix": int(time.time()), **sample}])

    async def list(self, request: Request) -> Response:
        query = request.query_params
        # The SDK encodes the filter three times: Starlette decodes once and parse_qsl once.
        metadata = {unquote(name): unquote(value) for name, value in parse_qsl(query.get("metadata", ""))}
        states = {state for state in query.get("state", "running,paused").split(",") if state}
        limit, start = _number(query.get("limit"), 100, "limit"), _number(query.get("nextToken"), 0, "nextToken")
        started_after, template = _moment(query.get("startedAfter")), query.get("template")
        now = clock()
        found = [
            box
            for box in self._fleet.all()
            if now < box.record.deadline
            and box.record.state in states
            and box.record.started_at > started_after
            and template in (None, "", box.record.template)
            and metadata.items() <= box.record.metadata.items()
        ]
        found.sort(key=lambda box: box.record.started_at, reverse=query.get("order") != "asc")
        end = start + max(1, min(limit, PAGE_SIZE_MAX))
        headers = {"X-Next-Token": str(end)} if end < len(found) else {}
        return JSONResponse([self._detail(box) for box in found[start:end]], headers=headers)

    def _box(self, request: Request) -> BoxClient:
        box_id = request.path_params["box_id"]
        try:
            return self._fleet.get(box_id)
        except BoxNotFoundError as error:
            raise no_such_box(box_id) from error

    def _ttl(self, seconds: int | None) -> int:
        if seconds is None:
            return min(self._settings.default_ttl_seconds, self._settings.max_ttl_seconds)
        if seconds > (limit := self._settings.max_ttl_seconds):
            raise RefusalError(400, f"timeout: {seconds} s is more than the {limit} s this gateway allows")
        return seconds

    def _sandbox(self, box: BoxClient) -> dict[str, Any]:
        record = box.record
        return {
            "templateID": record.template,
            "sandboxID": record.id,
            "clientID": "local",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": record.token,
            "domain": f"localhost:{self._settings.port}",
            "alias": record.template,
        }

    def _detail(self, box: BoxClient) -> dict[str, Any]:
        record = box.record
        return {
            **self._sandbox(box),
            "startedAt": _iso(record.started_at),
            "endAt": _iso(time.time() + record.deadline - clock()),
            "cpuCount": os.cpu_count() or 1,
            "memoryMB": record.memory_bytes >> 20,
            "diskSizeMB": _total_disk_bytes(box) >> 20,
            "state": record.state,
            "metadata": record.metadata,
            "allowInternetAccess": False,
        }


def no_such_box(box_id: str) -> RefusalError:
    return RefusalError(404, f"sandbox '{box_id[:64]}' doesn't exist or you don't have access to it")


def _is_already_so(network: Any) -> bool:
    """Return whether a box without settings obeys these: it reaches nothing but ports of its own loopback."""
    if not isinstance(network, dict) or set(network) - {"allowOut", "denyOut"}:
        return False
    allowed, denied = (network.get(name) or [] for name in ("allowOut", "denyOut"))
    return isinstance(allowed, list) and set(map(str, allowed)) <= _LOOPBACK and denied == [_ALL_TRAFFIC]


async def _read(request: Request, model: type[BodyT]) -> BodyT:
    try:
        return parse(model, await read_body(request))
    except BoxFaultError as error:
        raise RefusalError(400, error.message) from error


def _number(text: str | None, default: int, name: str) -> int:
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise RefusalError(400, f"{name}: {text[:40]!r} is not a number")
    return int(text)


def _moment(text: str | None) -> float:
    """Parse an ISO-8601 time or a number of seconds to Unix time; 0 for None."""
    if not text:
        return 0.0
    try:
        return (
            float(text)
            if text.replace(".", "", 1).isdigit()
            else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
        )
    except (ValueError, OverflowError):
        raise RefusalError(400, f"{text[:40]!r} is no moment; expected ISO 8601 or seconds") from None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def _take_sample(box: BoxClient) -> dict[str, float | int]:
    """Return the fields of E2B's SandboxMetric without its time. Zero if this machine has no control groups."""
    group = cgroups.cgroup_at(str(box.record.spec["cgroup"]))
    before = _cpu_seconds(group)
    await asyncio.sleep(_CPU_SAMPLE_SECONDS)
    used = max(0.0, _cpu_seconds(group) - before)
    memory, cache = group.memory_bytes()
    return {
        "cpuCount": os.cpu_count() or 1,
        "cpuUsedPct": round(100 * used / _CPU_SAMPLE_SECONDS, 1),
        "memUsed": memory,
        "memTotal": box.record.memory_bytes,
        "memCache": cache,
        "diskUsed": await asyncio.to_thread(_disk_used_bytes, box),
        "diskTotal": _total_disk_bytes(box),
    }


def _total_disk_bytes(box: BoxClient) -> int:
    """Return the box's own limit, or the free bytes of its directory's file system."""
    limit = int(box.record.spec.get("disk_bytes") or 0)
    if limit:
        return limit
    status = os.statvfs(box.directory)
    return status.f_bavail * status.f_frsize


def _disk_used_bytes(box: BoxClient) -> int:
    used = 0
    for folder, _names, files in os.walk(box.directory):
        for name in files:
            try:
                used += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return used


def _cpu_seconds(group: cgroups.Cgroup) -> float:
    total = 0.0
    for pid in group.process_ids():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total
