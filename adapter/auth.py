"""Who is calling: a bearer token or `x-api-key` → the session it belongs to.

Why here: there is no admin API and no other secret; sessions are rows, and this is the only look at them from outside.
Called by: `app.py`, before a request's body is read.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping

from ratchet.store.database import Database
from ratchet.store.sessions import SessionRow, find_session, token_hash
from ratchet.types import SessionState

_CACHE_SECONDS = 60.0  # longer than most agents think between two calls
_CACHE_SIZE = 10_000


class UnauthorisedError(Exception):
    """No token, an unknown one, or one whose session is closed. Which of them is not told."""


class SessionAuth:
    """Look-ups by sha256, so their time says nothing about a token; open sessions are remembered for a minute.

    A session closed meanwhile is noticed when a turn is opened, by the store.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: OrderedDict[bytes, tuple[float, SessionRow]] = OrderedDict()

    async def authenticate(self, headers: Mapping[str, str]) -> SessionRow:
        """Raises UnauthorisedError, or StoreUnavailableError where the store cannot be asked."""
        digest = token_hash(_token(headers))
        cached = self._cache.get(digest)
        if cached is not None and cached[0] > time.monotonic():
            return cached[1]
        async with self._database.begin() as conn:
            session = await find_session(conn, digest)
        if session is None or session.state is not SessionState.OPEN:
            self._cache.pop(digest, None)
            raise UnauthorisedError
        self._cache[digest] = (time.monotonic() + _CACHE_SECONDS, session)
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return session


def _token(headers: Mapping[str, str]) -> str:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
