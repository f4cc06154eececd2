import base64
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from temporalio.api.common.v1 import Payload, Payloads

from ratchet.payload_codec import EncryptionCodec
from stack.codec_server import codec_app

UI = "http://127.0.0.1:8233"
PLAIN = Payload(metadata={"encoding": b"json/plain"}, data=b'"mend the parser"')


@pytest.fixture
def codec(tmp_path: Path) -> EncryptionCodec:
    path = tmp_path / "payload_keys"
    path.write_text(f"first:{base64.b64encode(bytes(32)).decode()}\n")
    return EncryptionCodec(path)


@pytest.fixture
async def ui(codec: EncryptionCodec) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(codec_app(codec, "token", UI))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://codec", headers={"origin": UI}, timeout=60
    ) as client:
        yield client


def body(*payloads: Payload) -> object:
    return MessageToDict(Payloads(payloads=payloads))


async def test_payloads_are_shown_and_encrypted(ui: httpx.AsyncClient, codec: EncryptionCodec) -> None:
    hidden = (await codec.encode([PLAIN]))[0]
    shown = await ui.post("/token/decode", json=body(hidden, PLAIN))
    assert shown.json() == body(PLAIN, PLAIN)
    assert shown.headers["access-control-allow-origin"] == UI
    encrypted = await ui.post("/token/encode", json=body(PLAIN))
    assert (await ui.post("/token/decode", json=encrypted.json())).json() == body(PLAIN)
    assert "parser" not in str(encrypted.json())


async def test_a_browser_may_call_it_for_the_ui_only(ui: httpx.AsyncClient) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-namespace"}
    asks["access-control-request-private-network"] = "true"
    allowed = await ui.options("/token/decode", headers=asks)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-private-network"] == "true"
    refused = await ui.options("/token/decode", headers=asks | {"origin": "https://elsewhere.example.com"})
    assert "access-control-allow-origin" not in refused.headers


async def test_without_the_token_nothing_is_shown(ui: httpx.AsyncClient, codec: EncryptionCodec) -> None:
    hidden = body(*await codec.encode([PLAIN]))
    for path in ("/decode", "/other/decode", "/token"):
        assert (await ui.post(path, json=hidden)).status_code == 404


async def test_mistakes_are_named(ui: httpx.AsyncClient) -> None:
    unknown = Payload(metadata={"encoding": b"binary/encrypted", "encryption-key-id": b"old"}, data=bytes(40))
    answer = await ui.post("/token/decode", json=body(unknown))
    assert answer.status_code == 409 and "add it as a line `old:KEY`" in answer.text
    assert (await ui.post("/token/decode", json={"wrong": 1})).status_code == 400
    assert (await ui.post("/token/decode", content=b"{")).status_code == 400
