"""Reads how far the agents of a worker are, with one query for all of them.

A worker watches hundreds of agents every few seconds. A query per agent and look fills the pool and the event loop, and
what waits behind them looks dead.
"""

import asyncio

from store import sessions
from store.database import Database
from store.sessions import AttemptKey, SessionProgress

_GATHER_SECONDS = 0.1
"""The time for which a query waits for further agents to ask about."""


class ProgressReader:
    """One query runs at a time; calls made meanwhile share the next one. Used on one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._asked: dict[AttemptKey, asyncio.Future[SessionProgress]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def read(self, rollout_id: int, attempt: int) -> SessionProgress:
        """Return the progress of an attempt, whose session `boot` has opened. Raises StoreUnavailableError."""
        key = (rollout_id, attempt)
        if key not in self._asked:
            self._asked[key] = asyncio.get_running_loop().create_future()
        answer = self._asked[key]
        if self._reading is None:
            self._reading = asyncio.create_task(self._answer_all())
        return await asyncio.shield(answer)  # one that stops waiting must not take the answer from the others

    async def _answer_all(self) -> None:
        try:
            while self._asked:
                await asyncio.sleep(_GATHER_SECONDS)
                asked = self._asked
                self._asked = {}
                await self._answer(asked)
        finally:
            self._reading = None

    async def _answer(self, asked: dict[AttemptKey, asyncio.Future[SessionProgress]]) -> None:
        try:
            found = await self._database.read(sessions.read_progress, asked)
        except BaseException as error:
            for answer in asked.values():
                answer.set_exception(error)
                answer.exception()  # it is no mistake if all who asked have left
            if not isinstance(error, Exception):
                raise
            return
        for key, answer in asked.items():
            if key in found:
                answer.set_result(found[key])
            else:
                answer.set_exception(AssertionError(f"attempt {key} has no session, which boot makes"))
                answer.exception()
