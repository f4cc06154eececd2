"""Signed file URLs: `/files?path=…&signature=v1_…[&signature_expiration=…]` instead of an access token.

The SDK's `download_url` and `upload_url` serve clients that have neither key nor token.
"""

import base64
import hashlib
import hmac
import time
from collections.abc import Iterable

from starlette.requests import Request

from sandbox_gateway.box_client import BoxClient
from sandbox_gateway.wire_errors import RefusalError

_OPERATIONS = {"GET": "read", "POST": "write"}


def is_signed(request: Request) -> bool:
    return request.url.path == "/files" and "signature" in request.query_params


def signed_box(request: Request, boxes: Iterable[BoxClient]) -> BoxClient:
    """Return the box whose token made the signature; on a shared origin the URL names no box. Raises
    RefusalError(401).
    """
    given, query = request.query_params["signature"], request.query_params
    expires = query.get("signature_expiration")
    if expires is not None and (not expires.isascii() or not expires.isdigit() or int(expires[:15]) < time.time()):
        raise RefusalError(401, "signature is already expired")
    found = [
        box
        for box in boxes
        if hmac.compare_digest(given.encode(), _signature(request, box.record.token, expires).encode())
    ]
    if not found:
        raise RefusalError(401, "invalid signature")
    return found[0]


def _signature(request: Request, token: str, expires: str | None) -> str:
    query = request.query_params
    parts = [query.get("path", ""), _OPERATIONS.get(request.method, ""), query.get("username", ""), token]
    raw = ":".join(parts if expires is None else [*parts, expires])
    return "v1_" + base64.b64encode(hashlib.sha256(raw.encode()).digest()).rstrip(b"=").decode()
