"""A stand-in of E2B's API for builds of templates: it takes the files, "runs" the steps, and keeps what it was asked.

A step whose command has the word `fail` fails. Paths, statuses and fields are those that the SDK's client expects.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Builds:
    """The requests that were received. `status`: status of the answers to POST, if it is not 0."""

    url: str = ""
    names: list[str] = field(default_factory=list)
    uploads: list[bytes] = field(default_factory=list)
    started: list[dict[str, Any]] = field(default_factory=list)
    status: int = 0

    def logs(self, offset: int) -> list[dict[str, str]]:
        steps = self.started[-1].get("steps", [])
        lines = [f"{step['type']} {' '.join(step.get('args', []))}" for step in steps]
        at = datetime.now(UTC).isoformat()
        return [{"timestamp": at, "message": line, "level": "info"} for line in lines][offset:]

    def failure(self) -> str | None:
        steps = self.started[-1].get("steps", [])
        return next(("exit status 7" for step in steps if any("fail" in one for one in step.get("args", []))), None)


@contextmanager
def serving_builds() -> Iterator[Builds]:
    builds = Builds()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: Any = None) -> None:
            content = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("content-length") or 0))

        def do_POST(self) -> None:
            body = self.body()
            if builds.status:
                return self.answer(builds.status, {"code": builds.status, "message": "not now"})
            if self.path == "/v3/templates":
                builds.names.append(json.loads(body)["name"])
                lists = {"names": [], "tags": [], "aliases": []}
                return self.answer(202, {"templateID": "t1", "buildID": "b1", "public": False, **lists})
            builds.started.append(json.loads(body))
            return self.answer(202)

        def do_PUT(self) -> None:
            builds.uploads.append(self.body())
            self.answer(200)

        def do_GET(self) -> None:
            if "/files/" in self.path:
                return self.answer(201, {"present": False, "url": f"{builds.url}/upload"})
            offset = int(self.path.partition("logsOffset=")[2].partition("&")[0] or 0)
            failure = builds.failure()
            body = {
                "templateID": "t1",
                "buildID": "b1",
                "status": "error" if failure else "ready",
                "logs": [],
                "logEntries": builds.logs(offset),
            }
            return self.answer(200, body | ({"reason": {"message": failure}} if failure else {}))

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    builds.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield builds
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
