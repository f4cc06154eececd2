"""Log exceptions that no rule explains, once per kind, for callers that wait and try again.

Such a caller takes any exception for an outage, because a list of outages is never complete. A bug of this program
would be waited for, too: the log has its traceback.
"""

import traceback
from typing import Final

import structlog

from ratchet.secrets import without_secrets

_LOG = structlog.get_logger()
_MAX_KINDS: Final = 200
_logged: set[tuple[str, str]] = set()
"""The errors that this process has logged: the exception's class and the place that raised it."""


def log_unexplained(event: str, error: BaseException, **facts: object) -> None:
    """Log the traceback of an exception, unless one of its class from the same place has been logged."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kind = (f"{type(error).__module__}.{type(error).__qualname__}", place)
    if kind in _logged or len(_logged) >= _MAX_KINDS:
        return
    _logged.add(kind)
    text = "".join(traceback.format_exception(error))
    _LOG.error(event, kind=kind[0], place=place, traceback=without_secrets(text), **facts)
