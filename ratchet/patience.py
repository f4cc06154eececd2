"""The limit of one answer of a server to a command, and the words of the command meanwhile: slow is not broken."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator

ANSWER_SECONDS = 120.0
"""Limit of one answer to a command of a person. A server that is away refuses at once, so only one that is very slow or
hangs is waited for so long."""
_SAY_SECONDS = 5.0


class Patience:
    """The wait of one command for one server. `what`: its name and address."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._has_said = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Say on standard error, once, if the block takes long."""
        timer = asyncio.get_running_loop().call_later(_SAY_SECONDS, self._say)
        try:
            yield
        finally:
            timer.cancel()

    def _say(self) -> None:
        if not self._has_said:
            print(f"ratchet: {self.what} is slow to answer; it is waited for", file=sys.stderr, flush=True)
        self._has_said = True
