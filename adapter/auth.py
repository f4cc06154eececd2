"""Authenticate a request: its bearer token or `x-api-key` names a session, a row of the store. No other secret."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ratchet.errors import StoreUnavailableError
from ratchet.types import SessionState
from store.database import Database
from store.sessions import SessionRow, find_session, token_hash

_CACHE_SECONDS = 60.0  # longer than most agents take between two calls
_CACHE_SIZE = 10_000


class UnauthorisedError(Exception):
    """Raised for no token, an unknown one, or one whose session is closed. The client is not told which."""


@dataclass(frozen=True, slots=True)
class _CachedSession:
    expires_at: float
    row: SessionRow


class SessionAuth:
    """Tokens are looked up by their sha256, so that the time of a look-up reveals nothing about a token.

    Open sessions are cached for a minute, and longer while the store is unavailable. If one is closed meanwhile, the
    store refuses to open its next turn.
    """

    def __init__(self, database: Database, has_schema: Callable[[], bool]) -> None:
        """`has_schema`: whether the store is known to have this program's schema; until then it counts as away."""
        self._database = database
        self._has_schema = has_schema
        self._cache: OrderedDict[bytes, _CachedSession] = OrderedDict()

    async def authenticate(self, headers: Mapping[str, str]) -> SessionRow:
        """Return a token's session. UnauthorisedError; StoreUnavailableError if unknown while the store is down."""
        digest = token_digest(headers)
        cached = self._cache.get(digest)
        if cached is not None and cached.expires_at > time.monotonic():
            return cached.row
        if not self._has_schema():
            raise StoreUnavailableError("the store's schema is not known yet")
        try:
            row = await self._database.read(find_session, digest)
        except StoreUnavailableError:
            if cached is not None:
                return cached.row
            raise
        if row is None or row.state is not SessionState.OPEN:
            self._cache.pop(digest, None)
            raise UnauthorisedError
        self._cache[digest] = _CachedSession(time.monotonic() + _CACHE_SECONDS, row)
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return row


def token_digest(headers: Mapping[str, str]) -> bytes:
    """Return the digest of a request's token. Raises UnauthorisedError if it has none."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    token = credentials.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not token:
        raise UnauthorisedError
    return token_hash(token)
