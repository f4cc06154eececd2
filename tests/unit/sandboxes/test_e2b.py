"""Answers of services with E2B's API that are not those that were asked for."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ratchet.errors import SandboxBusyError
from sandboxes.e2b import E2BProvider

_PAGES = {"": "b", "b": "c", "c": "b"}


def _row(name: str) -> dict[str, object]:
    return {"sandboxID": name, "metadata": {"owner": "us"}, "startedAt": "2026-01-01T00:00:00Z", "state": "running"}


class _Service(BaseHTTPRequestHandler):
    """Lists three pages of which the last names the second again, and describes the box `other` only."""

    def do_GET(self) -> None:
        page = self.path.partition("nextToken=")[2].partition("&")[0]
        is_list = self.path.startswith("/v2/sandboxes")
        body = json.dumps([_row(f"box-{page}")] if is_list else _row("other-machine")).encode()
        self.send_response(200)
        if is_list:
            self.send_header("x-next-token", _PAGES[page])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def provider() -> Iterator[E2BProvider]:
    with HTTPServer(("127.0.0.2", 0), _Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield E2BProvider("e2b_" + 40 * "0", f"http://127.0.0.2:{server.server_address[1]}")
        server.shutdown()
        thread.join()


async def test_pages_that_come_back_are_an_outage_and_no_endless_list(provider: E2BProvider) -> None:
    with pytest.raises(SandboxBusyError, match="page 'b'"):
        await provider.list({"owner": "us"})


async def test_an_answer_about_another_box_is_none_about_this_one(provider: E2BProvider) -> None:
    assert (await provider.describe("other")).id == "other-machine"
    with pytest.raises(SandboxBusyError, match="answers about box other-machine"):
        await provider.describe("mine-machine")
