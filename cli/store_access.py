"""One query for a command that only reads.

Why here: every read command opens the store the same way.
Called by: `runs`, `rollouts`, `show` and `status`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import MachineError, StoreUnavailableError
from stack.parts import Stack

_T = TypeVar("_T")


def query(read: Callable[[AsyncConnection], Awaitable[_T]]) -> _T:
    """Raises MachineError where the store does not answer."""

    async def run() -> _T:
        async with Stack().database() as database, database.begin() as connection:
            return await read(connection)

    try:
        return asyncio.run(run())
    except StoreUnavailableError as error:
        raise MachineError(f"{error}; start the stack with `ratchet up`") from None
