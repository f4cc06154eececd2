"""A stand-in of an E2B-compatible sandbox service that we did not write, without boxes: create, look up, list and kill.

`deviation` names what it does otherwise than E2B's own API.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit
from uuid import uuid4

from sandboxes.e2b import E2BProvider
from tests.standins.http_server import LoopbackServer, QuietHandler

IGNORES_FILTER = "the filter of `list` is ignored"
NULL_METADATA = "metadata is null in every answer"
NO_METADATA = "no answer has metadata"
FEW_FIELDS = "the filter is ignored, and rows have no cpuCount, memoryMB, state and end"
DEVIATIONS = (IGNORES_FILTER, NULL_METADATA, NO_METADATA, FEW_FIELDS)
OLD_ROUTES = "boxes are created and connected at the older routes only; of others the answer is no JSON"
NO_ROUTES = "no route creates a box"
IGNORES_KEYS = "every create call makes a box"
NO_TOKEN = "the token of a box is in the answers to create and connect only, and connect sets the box's end"
OTHER_WORDS = "a box that is gone is answered in plain text"
EMPTY_ANSWERS = "what has no content is answered with 200"
NO_NETWORK_ROUTE = "the network of a box cannot be changed; the answer to an unknown route is JSON"
NO_NETWORK_ROUTE_TEXT = "the network of a box cannot be changed; the answer to an unknown route is plain text"
CAPS_TTL = "boxes live 60 s at most, whatever is asked"


@dataclass
class ForeignBoxes:
    """`boxes`: the metadata of each living box by its id, which a test may change. `killed`: ids, in order."""

    deviation: str = ""
    url: str = ""
    boxes: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    ends: dict[str, datetime] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    networks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, metadata: dict[str, str], seconds: int = 3600) -> str:
        box_id = f"i{uuid4().hex[:12]}"
        self.boxes[box_id] = metadata
        self.set_end(box_id, seconds)
        return box_id

    def set_end(self, box_id: str, seconds: int) -> None:
        seconds = min(seconds, 60) if self.deviation == CAPS_TTL else seconds
        self.ends[box_id] = datetime.now(UTC) + timedelta(seconds=seconds)

    def provider(self) -> E2BProvider:
        return E2BProvider("e2b_" + "0" * 40, self.url, self.url)

    def create(self, key: str, body: dict[str, Any]) -> dict[str, Any]:
        self.created.append(body)
        if self.keys.get(key) not in self.boxes or self.deviation in (IGNORES_KEYS, OLD_ROUTES):
            self.keys[key] = self.add(body.get("metadata") or {}, body.get("timeout", 300))
        return self.row(self.keys[key]) | {"envdAccessToken": "t"}

    def row(self, box_id: str) -> dict[str, Any]:
        now = datetime.now(UTC)
        row: dict[str, Any] = {
            "sandboxID": box_id,
            "templateID": "base",
            "clientID": "c",
            "startedAt": (now - timedelta(hours=1)).isoformat(),
            "endAt": self.ends[box_id].isoformat(),
            "envdAccessToken": "t",
            "envdVersion": "0.5.7",
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 512,
            "state": "paused" if box_id in self.paused else "running",
            "metadata": self.boxes[box_id],
        }
        if self.deviation == NO_TOKEN:
            del row["envdAccessToken"]
        if self.deviation == NULL_METADATA:
            row["metadata"] = None
        if self.deviation == NO_METADATA:
            del row["metadata"]
        if self.deviation == FEW_FIELDS:
            for name in ("cpuCount", "memoryMB", "diskSizeMB", "state", "endAt", "clientID"):
                del row[name]
        return row

    def listed(self, query: str) -> list[dict[str, Any]]:
        wanted = dict(parse_qsl(parse_qs(query).get("metadata", [""])[0]))
        asked = {unquote(name): unquote(value) for name, value in wanted.items()}
        if self.deviation in DEVIATIONS:
            asked = {}
        return [self.row(box_id) for box_id, metadata in self.boxes.items() if asked.items() <= metadata.items()]


@contextmanager
def serving_foreign_boxes(deviation: str = "") -> Iterator[ForeignBoxes]:
    service = ForeignBoxes(deviation)

    class Handler(QuietHandler):
        def reply(self, status: int, content: Any = None) -> None:
            status = 200 if service.deviation == EMPTY_ANSWERS and content is None else status
            self.answer(status, b"" if content is None else json.dumps(content).encode())

        def do_GET(self) -> None:
            box_id = urlsplit(self.path).path.rpartition("/")[2]
            if box_id == "sandboxes":
                self.reply(200, service.listed(urlsplit(self.path).query))
            elif box_id in service.boxes:
                self.reply(200, service.row(box_id))
            else:
                self.no_box()

        def no_box(self) -> None:
            if service.deviation == OTHER_WORDS:
                self.answer(404, b"nothing here")
            else:
                self.reply(404, {"code": 404, "message": "there is no such instance"})

        def do_PUT(self) -> None:
            body = json.loads(self.body())
            if self.path.split("/")[-2] not in service.boxes:
                return self.no_box()
            if service.deviation == NO_NETWORK_ROUTE:
                return self.reply(404, {"code": 404, "message": "not found"})
            if service.deviation == NO_NETWORK_ROUTE_TEXT:
                return self.answer(404, b"404 page not found")
            service.networks.append(body)
            self.reply(204)

        def do_POST(self) -> None:
            body = json.loads(self.body() or b"{}")
            is_new_route = self.path.startswith("/v2/")
            *_, box_id, operation = self.path.split("/")
            if service.deviation == NO_ROUTES or (service.deviation == OLD_ROUTES and is_new_route):
                self.answer(404, b"404 page not found")
            elif operation == "sandboxes":
                self.reply(201, service.create(str(self.headers["idempotency-key"]), body))
            elif box_id not in service.boxes:
                self.no_box()
            elif operation == "timeout":
                service.set_end(box_id, body["timeout"])
                self.reply(204)
            else:  # connect
                service.paused.discard(box_id)
                service.set_end(box_id, body["timeout"])
                self.reply(200, service.row(box_id) | {"envdAccessToken": "t"})

        def do_DELETE(self) -> None:
            box_id = self.path.rpartition("/")[2]
            if service.boxes.pop(box_id, None) is None:
                return self.no_box()
            service.killed.append(box_id)
            self.reply(204)

    server = LoopbackServer(Handler)
    service.url = server.url
    try:
        yield service
    finally:
        server.close()
