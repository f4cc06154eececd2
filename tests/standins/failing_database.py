"""A connection to Postgres that fails in a way that `store.database` does not know, and works again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from store.database import Database


class FailingDatabase(Database):
    """The next `num_failures` transactions and reads fail, as while the server's certificate is replaced."""

    num_failures = 0
    num_begun = 0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        self._fail()
        async with super().begin() as connection:
            yield connection

    async def read(self, *arguments: Any) -> Any:
        self._fail()
        return await super().read(*arguments)

    def _fail(self) -> None:
        self.num_begun += 1
        if self.num_failures > 0:
            self.num_failures -= 1
            raise ValueError("the root certificate file does not exist")
