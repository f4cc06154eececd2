"""The local gateway's boxes as those of a service with one fault; all else is passed on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.standins.http_server import LoopbackServer, QuietHandler

NO_METADATA = "rows have no metadata"
SHORT_LIFE = "boxes live five minutes, whatever is asked"
NO_LIST = "the list of boxes is empty"
NO_KEYS = "every create call makes a box"
ALL_ENDED = "every call that ends a box says that it did"
CHANGED_FILES = "a file comes back without its last byte"
SHORT_OUTPUT = "output is cut"
OPEN_BOXES = "a box that is asked for without a network has one"
_PASSED = ("e2b-sandbox-id", "x-access-token", "x-api-key", "content-type", "authorization", "connect-timeout-ms")


@contextmanager
def serving_with_fault(gateway_url: str, fault: str) -> Iterator[str]:
    """Yield the service's address."""

    class Handler(QuietHandler):
        def pass_on(self) -> None:
            headers = {name: self.headers[name] for name in _PASSED if name in self.headers}
            if fault != NO_KEYS and "idempotency-key" in self.headers:
                headers["idempotency-key"] = self.headers["idempotency-key"]
            body = _asked(fault, self.path, self.body())
            if self.path.startswith("/process"):
                return self.stream(headers, body)
            given = client.request(self.command, self.path, headers=headers, content=body)
            status = 204 if fault == ALL_ENDED and self.command == "DELETE" else given.status_code
            content = _answered(fault, self.command, self.path, given.content)
            self.send_response(status)
            for name in ("content-type", "x-ratchet-gateway"):
                if name in given.headers:
                    self.send_header(name, given.headers[name])
            if status != 204:
                self.send_header("content-length", str(len(content)))
            self.end_headers()
            if status != 204:
                self.wfile.write(content)

        def body(self) -> bytes:
            if self.headers["transfer-encoding"] != "chunked":
                return self.rfile.read(int(self.headers["content-length"] or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def stream(self, headers: dict[str, str], body: bytes) -> None:
            with client.stream("POST", self.path, headers=headers, content=body) as given:
                self.send_response(given.status_code)
                self.send_header("content-type", given.headers["content-type"])
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for part in given.iter_raw():
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PUT = do_DELETE = pass_on

    with httpx.Client(base_url=gateway_url, trust_env=False, timeout=120) as client:
        server = LoopbackServer(Handler)
        try:
            yield server.url
        finally:
            server.close()


def _asked(fault: str, path: str, body: bytes) -> bytes:
    if fault == SHORT_LIFE and path.endswith("/timeout"):
        return json.dumps({"timeout": 300}).encode()
    if fault == OPEN_BOXES and path.endswith("/sandboxes"):
        asked = json.loads(body)
        asked.pop("allow_internet_access", None)
        return json.dumps(asked).encode()
    if fault == SHORT_OUTPUT and path.endswith("/Start"):
        return body.replace(b"/dev/zero", b"/dev/null")
    return body


def _answered(fault: str, method: str, path: str, content: bytes) -> bytes:
    if fault == CHANGED_FILES and path.startswith("/files") and method == "GET":
        return content[:-1]
    if method != "GET" or "/sandboxes" not in path:
        return content
    found: Any = json.loads(content)
    if fault == NO_LIST and isinstance(found, list):
        found = []
    for row in found if isinstance(found, list) else [found]:
        if fault == NO_METADATA:
            row.pop("metadata", None)
    return json.dumps(found).encode()
