"""The codec server of Temporal's UI and CLI: they send it payloads, and it answers with them decrypted or encrypted.

Its protocol is that of Temporal's SDKs: POST /decode and /encode with `Payloads` as JSON. The first part of the path is
a token, because a program that reaches this address could read what Temporal stores.
"""

import secrets

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from temporalio.api.common.v1 import Payloads

from ratchet.payload_codec import EncryptionCodec, PayloadKeyError


def codec_app(codec: EncryptionCodec, token: str, ui_origin: str) -> Starlette:
    """Return the app. `ui_origin`: scheme, host and port of the UI, whose pages may call it from a browser."""

    async def convert(request: Request) -> JSONResponse:
        """Answer 404 for a wrong token, 400 for what is no `Payloads`, 409 with the remedy if a key is missing."""
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            raise HTTPException(404)
        payloads = Payloads()
        try:
            ParseDict(await request.json(), payloads)
        except (ParseError, ValueError) as error:
            raise HTTPException(400, f"expected Payloads as JSON: {error}") from None
        try:
            change = codec.decode if request.url.path.endswith("/decode") else codec.encode
            return JSONResponse(MessageToDict(Payloads(payloads=await change(payloads.payloads))))
        except PayloadKeyError as error:
            raise HTTPException(409, str(error)) from None

    cors = Middleware(
        CORSMiddleware,
        allow_origins=[ui_origin],
        allow_methods=["POST"],
        allow_headers=["authorization", "content-type", "x-namespace"],
        allow_private_network=True,  # a UI on the internet calls this machine's loopback
    )
    routes = [Route(f"/{{token}}/{action}", convert, methods=["POST"], name=action) for action in ("decode", "encode")]
    return Starlette(routes=routes, middleware=[cors])
