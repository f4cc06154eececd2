"""Write a file of each rollout of a run as it is graded, while a command follows the run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

from ratchet.background_task import running_beside
from ratchet.progress import ReportProgress
from stack.parts import Stack
from store.database import Database
from training.sample_export import dump_graded

_LOOK_SECONDS = 5.0
_OVERLAP = timedelta(minutes=1)
"""Each look goes so far back behind the newest rollout of the one before, since transactions end out of order."""
_LAST_LOOK_SECONDS = 600.0


@contextlib.asynccontextmanager
async def dumping(stack: Stack, run_id: str, pattern: str, say: ReportProgress) -> AsyncIterator[None]:
    """Write the files of `dump_graded` during the block and at its end.

    An error, such as an outage of the store or a full disk, delays them and is said once; it never ends the block.
    """
    async with stack.database() as database:
        dumps = _Dumps(database, run_id, pattern, say)
        async with running_beside(dumps.follow()):
            yield
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(dumps.try_look(), _LAST_LOOK_SECONDS)


class _Dumps:
    def __init__(self, database: Database, run_id: str, pattern: str, say: ReportProgress) -> None:
        self.database = database
        self.run_id = run_id
        self.pattern = pattern
        self.say = say
        self.problem = ""
        self.newest: datetime | None = None

    async def follow(self) -> None:
        while True:
            await self.try_look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def try_look(self) -> None:
        problem = ""
        try:
            await self._look()
        except Exception as error:  # also one of a bug: the block is the training
            problem = f"rollouts are not dumped: {error}"
        if problem and problem != self.problem:
            self.say(problem)
        self.problem = problem

    async def _look(self) -> None:
        since = None if self.newest is None else self.newest - _OVERLAP
        async with self.database.begin() as connection:
            self.newest = await dump_graded(connection, self.run_id, self.pattern, since)
