"""Set up the log of a stack part's process, and log the error that ends it."""

import functools
from collections.abc import Callable
from typing import Any

import structlog

from ratchet.errors import RatchetError
from ratchet.logs import configure_logs, is_json


def logging_part(part: Callable[..., None]) -> Callable[..., None]:
    """Return the command of a part, which sets the log up first. With text, `cli.main` prints errors."""

    @functools.wraps(part)
    def run(*args: Any, **kwargs: Any) -> None:
        configure_logs(part.__name__.replace("_", "-"))
        if not is_json():
            return part(*args, **kwargs)
        try:
            part(*args, **kwargs)
        except RatchetError as error:
            structlog.get_logger().error(f"ratchet: {error}")
            raise SystemExit(error.cli_exit_code) from None
        except Exception:
            structlog.get_logger().exception("the part has failed")
            raise SystemExit(1) from None

    return run
