"""Access to the viewer: everybody on this machine if it listens on loopback only, else those who present the token."""

import secrets
from base64 import b64decode
from binascii import Error as Base64Error
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import URL, Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

_COOKIE = "ratchet_viewer"
_PARAMETER = "token"
_OPEN_PATHS = ("/health",)
"""Paths that say nothing about runs."""
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""Texts in pages come from agents and models: no script but the viewer's own may run. Styles may be inline, because
uPlot positions its parts so."""


class TokenGate:
    """Refuse requests without the token, as bearer token, as password of basic authentication, or as cookie.

    A link with `?token=` sets the cookie and redirects to the same page without it.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        response = self._login(scope)
        if response is None and not self._is_known(headers):
            response = PlainTextResponse(
                "This viewer needs its token: open the link that `ratchet view` prints, or log in with it as password.",
                401,
                {"www-authenticate": 'Basic realm="ratchet viewer", charset="UTF-8"'},
            )
        await (response or self._app)(scope, receive, send)

    def _login(self, scope: Scope) -> Response | None:
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(pairs).get(_PARAMETER)
        if given is None or not self._equals(given):
            return None
        rest = urlencode([pair for pair in pairs if pair[0] != _PARAMETER])
        target = URL(scope=scope).path + (f"?{rest}" if rest else "")
        response = RedirectResponse("/" + target.lstrip("/"), 303)
        response.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict", max_age=30 * 86400)
        return response

    def _is_known(self, headers: Headers) -> bool:
        kind, _, value = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._equals(value.strip())
        if kind.lower() == "basic":
            try:
                return self._equals(b64decode(value, validate=True).decode().partition(":")[2])
            except (Base64Error, UnicodeDecodeError):
                return False
        return self._equals(cookie_parser(headers.get("cookie", "")).get(_COOKIE, ""))

    def _equals(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())
