"""Open the store for one read-only query, the same way for every command that reads."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from client import Client

_T = TypeVar("_T")


def query(read: Callable[[AsyncConnection], Awaitable[_T]]) -> _T:
    """Run `read` in a transaction and return its result. Raises MachineError if the store does not answer."""
    return Client().read(read)
