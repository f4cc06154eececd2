"""A connection to Postgres that fails in a way that `store.database` does not know, and works again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncConnection

from store.database import Database


class FailingDatabase(Database):
    """The next `num_failures` transactions fail, as while the file with the server's certificate is replaced."""

    num_failures = 0
    num_begun = 0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        self.num_begun += 1
        if self.num_failures > 0:
            self.num_failures -= 1
            raise ValueError("the root certificate file does not exist")
        async with super().begin() as connection:
            yield connection
