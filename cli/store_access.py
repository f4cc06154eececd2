"""Open the store for one read-only query, the same way for every command that reads."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import MachineError, StoreUnavailableError
from stack.parts import Stack

_T = TypeVar("_T")


def query(read: Callable[[AsyncConnection], Awaitable[_T]]) -> _T:
    """Run `read` in a transaction and return its result. Raises MachineError if the store does not answer."""

    async def run() -> _T:
        async with Stack().database() as database, database.begin() as connection:
            return await read(connection)

    try:
        return asyncio.run(run())
    except StoreUnavailableError as error:
        raise MachineError(f"{error}; start the stack with `ratchet up`") from None
