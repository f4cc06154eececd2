"""How the gateway says no: one exception per dialect of the E2B wire protocol.

Why here: the control plane answers `{code, message}` with a number, envd's RPCs with a Connect code as a word.
Called by: every route; `app.py` turns them into responses.
"""

from collections.abc import Mapping
from typing import Final

HTTP_STATUS_OF_CODE: Final[Mapping[str, int]] = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "unavailable": 503,
    "unauthenticated": 401,
    "internal": 500,
}


class RefusalError(Exception):
    """A control-plane or file refusal: an HTTP status and one sentence."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


class BoxNotFoundError(Exception):
    """No running box has this id. The SDK recognises the words `was not found` in a 502 from envd's side."""

    def __init__(self, box_id: str) -> None:
        super().__init__(f"sandbox '{box_id}' was not found")
        self.box_id = box_id
