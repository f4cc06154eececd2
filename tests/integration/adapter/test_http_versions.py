"""Clients that offer another version of HTTP, or know only the oldest one, get their answers.

Java's HttpClient offers HTTP/2 with each request, and with it Spring and Ktor do.
"""

import asyncio
import json
import re
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.integration.adapter.conftest import Opened, ScriptedEngine

OFFER = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
OFFERS = {
    "h2c": OFFER,
    "TLS": "Connection: Upgrade\r\nUpgrade: TLS/1.2\r\n",
    "websocket": "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
}


def body(text: str, **fields: Any) -> bytes:
    return json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 9} | fields
    ).encode()


def request(opened: Opened, sent: bytes, headers: str, version: str = "1.1") -> tuple[bytes, bytes]:
    """A head and a body, chunked if the headers say so."""
    chunked = "chunked" in headers
    length = "" if chunked else f"content-length: {len(sent)}\r\n"
    head = f"POST /v1/messages HTTP/{version}\r\nhost: x\r\nx-api-key: {opened.token}\r\n{headers}{length}\r\n".encode()
    half = len(sent) // 2
    pieces = (sent[:half], sent[half:])
    return head, b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n" if chunked else sent


async def read_answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    length = re.search(rb"content-length: (\d+)", head)
    assert head.startswith(b"HTTP/1.1 200") and length
    return dict(json.loads(await reader.readexactly(int(length[1]))))


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("num_segments", [1, 2, 40])
@pytest.mark.parametrize("offer", list(OFFERS))
async def test_an_offer_of_another_protocol_is_ignored(
    adapter: str, engine: ScriptedEngine, opened: Opened, offer: str, num_segments: int, is_chunked: bool
) -> None:
    """Later requests on the connection are served, too, with and without an offer."""
    await engine.say("one", "two", "three")
    url = httpx.URL(adapter)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    headers = OFFERS[offer] + ("transfer-encoding: chunked\r\n" if is_chunked else "")
    for text, sent in (("one", headers), ("two", headers), ("three", "")):
        head, rest = request(opened, body(text), sent)
        whole = head + rest
        cuts = (
            [0, len(head), len(whole)]
            if num_segments == 2
            else [*range(0, len(whole), len(whole) // num_segments), len(whole)]
        )
        for begin, end in pairwise(cuts):
            writer.write(whole[begin:end])
            await writer.drain()
            await asyncio.sleep(0.005)
        assert (await read_answer(reader))["content"][0]["text"] == text
    writer.close()
    assert [turn.state for turn in await opened.wait_delivered(3)] == ["completed"] * 3


async def test_pipelined_requests_with_offers_are_served_in_order(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say("one", "two")
    url = httpx.URL(adapter)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"".join(b"".join(request(opened, body(text), OFFER)) for text in ("one", "two")))
    assert [(await read_answer(reader))["content"][0]["text"] for _ in range(2)] == ["one", "two"]
    writer.close()


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_in_http_1_0_ends_with_the_connection_and_has_no_chunks(
    adapter: str, engine: ScriptedEngine, opened: Opened, streams: bool
) -> None:
    await engine.say("one two three")
    url = httpx.URL(adapter)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"".join(request(opened, body("go", stream=streams), "", version="1.0")))
    head, _, rest = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    if streams:
        assert rest.startswith(b"event: message_start\n") and rest.endswith(b"\n\n") and b"message_stop" in rest
    else:
        assert json.loads(rest)["content"][0]["text"] == "one two three"
    writer.close()
    assert [turn.delivered for turn in await opened.wait_delivered(1)] == [True]
