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


@dataclass
class ForeignBoxes:
    """`boxes`: the metadata of each living box by its id, which a test may change. `killed`: ids, in order."""

    deviation: str = ""
    url: str = ""
    boxes: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)

    def add(self, metadata: dict[str, str]) -> str:
        box_id = f"i{uuid4().hex[:12]}"
        self.boxes[box_id] = metadata
        return box_id

    def provider(self) -> E2BProvider:
        return E2BProvider("e2b_" + "0" * 40, self.url, self.url)

    def row(self, box_id: str) -> dict[str, Any]:
        now = datetime.now(UTC)
        row: dict[str, Any] = {
            "sandboxID": box_id,
            "templateID": "base",
            "clientID": "c",
            "startedAt": (now - timedelta(hours=1)).isoformat(),
            "endAt": (now + timedelta(hours=1)).isoformat(),
            "envdVersion": "0.5.7",
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 512,
            "state": "running",
            "metadata": self.boxes[box_id],
        }
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
        if self.deviation:
            asked = {}
        return [self.row(box_id) for box_id, metadata in self.boxes.items() if asked.items() <= metadata.items()]


@contextmanager
def serving_foreign_boxes(deviation: str = "") -> Iterator[ForeignBoxes]:
    service = ForeignBoxes(deviation)

    class Handler(QuietHandler):
        def reply(self, status: int, content: Any = None) -> None:
            self.answer(status, b"" if content is None else json.dumps(content).encode())

        def do_GET(self) -> None:
            box_id = urlsplit(self.path).path.rpartition("/")[2]
            if box_id == "sandboxes":
                self.reply(200, service.listed(urlsplit(self.path).query))
            elif box_id in service.boxes:
                self.reply(200, service.row(box_id))
            else:
                self.reply(404, {"code": 404, "message": "there is no such instance"})

        def do_POST(self) -> None:
            body = json.loads(self.body())
            key = str(self.headers["idempotency-key"])
            if service.keys.get(key) not in service.boxes:
                service.keys[key] = service.add(body.get("metadata") or {})
            self.reply(201, service.row(service.keys[key]))

        def do_DELETE(self) -> None:
            box_id = self.path.rpartition("/")[2]
            if service.boxes.pop(box_id, None) is None:
                return self.reply(404, {"code": 404, "message": "there is no such instance"})
            service.killed.append(box_id)
            self.reply(204)

    server = LoopbackServer(Handler)
    service.url = server.url
    try:
        yield service
    finally:
        server.close()
