"""Refusals of the gateway: one exception per dialect of the E2B wire protocol.

The control plane answers `{code, message}` with a number, envd's RPCs with a Connect code as a word; `app.py`
translates these exceptions into responses.
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
RETRY_AFTER = {"Retry-After": "5", "Should-Retry": "false"}  # the caller's retry policy decides, not the SDK's


class RefusalError(Exception):
    """A refusal of the control plane or of file routes: an HTTP status and one sentence."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


def unsupported(what: str, remedy: str) -> str:
    """Return the words with which this gateway refuses a part of E2B's service that it does not have."""
    return f"not supported by the local gateway: {what}; {remedy}"


class BoxNotFoundError(Exception):
    """No running box has this id. The SDK recognises the words `was not found` in a 502 of envd's routes."""

    def __init__(self, box_id: str) -> None:
        super().__init__(f"sandbox '{box_id}' was not found")
        self.box_id = box_id
