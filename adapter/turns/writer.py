"""Group commit: what several calls have to write at the same moment goes into one transaction, and none is told before its commit.

Why here: a commit costs the same for one row as for twenty, and a thousand sessions share one disk.
Called by: `capture.py` (open, complete, delivered).

Nothing waits for company: the first to come is written at once, and what comes while that is being committed forms the next batch.
Nor does anybody wait for a stranger: what belongs to a session that a seal has locked is written apart, in a transaction of its own.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.errors import StoreUnavailableError
from ratchet.store import turns
from ratchet.store.database import Database
from ratchet.store.turns import CompletedTurn, NewTurn

_MOST = 64  # writes of one transaction
_BUSY = object()


@dataclass(frozen=True, slots=True)
class _Write:
    """One call's write, a turn's id where it was delivered, and who waits for it."""

    what: NewTurn | CompletedTurn | int
    done: "asyncio.Future[Any]"


class TurnWriter:
    def __init__(self, database: Database, lease_seconds: float) -> None:
        self._database, self._lease_seconds = database, lease_seconds
        self._waiting: list[_Write] = []
        self._task: asyncio.Task[None] | None = None
        self._apart: set[asyncio.Task[None]] = set()

    async def open(self, turn: NewTurn) -> int | None:
        """The id of the new row, None where the session is closed or the same (digest, ordinal) exists."""
        opened: int | None = await self._written(turn)
        return opened

    async def complete(self, turn: CompletedTurn) -> bool:
        """False where the session was sealed, or another process completed the turn first."""
        return bool(await self._written(turn))

    async def delivered(self, turn_id: int) -> None:
        """The answer's last byte was written; the lease is over."""
        await self._written(turn_id)

    async def _written(self, what: NewTurn | CompletedTurn | int) -> Any:
        write = _Write(what, asyncio.get_running_loop().create_future())
        self._waiting.append(write)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain())
        return await write.done

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            await self._settle(batch)

    async def _settle(self, batch: Sequence[_Write], wait: bool = False) -> None:
        """Everybody in the batch learns what became of theirs. One that cannot be written does not spoil the others."""
        try:
            results = await self._commit(batch, wait)
        except Exception as error:  # goes to whoever asked for the write
            if len(batch) > 1 and not isinstance(error, StoreUnavailableError):
                for write in batch:
                    await self._settle([write])
                return
            for write in batch:
                if not write.done.done():
                    write.done.set_exception(error)
            return
        for write, result in zip(batch, results, strict=True):
            if result is _BUSY:
                task = asyncio.create_task(self._settle([write], wait=True))
                self._apart.add(task)
                task.add_done_callback(self._apart.discard)
            elif not write.done.done():
                write.done.set_result(result)

    async def _commit(self, batch: Sequence[_Write], wait: bool) -> list[Any]:
        """What became of each: see `turns.WrittenTurns`; `_BUSY` where it was not written yet."""
        new = [write.what for write in batch if isinstance(write.what, NewTurn)]
        done = [write.what for write in batch if isinstance(write.what, CompletedTurn)]
        delivered = [write.what for write in batch if isinstance(write.what, int)]
        async with self._database.begin() as conn:
            written = await turns.write_turns(conn, new, done, delivered, self._lease_seconds, wait)
        opened, completed = iter(written.opened), iter(written.completed)
        results: list[Any] = []
        for write in batch:
            match write.what:
                case NewTurn():
                    result: Any = next(opened)
                case CompletedTurn():
                    result = next(completed)
                case _:
                    result = None
            busy = not isinstance(write.what, int) and write.what.session_id in written.busy
            results.append(_BUSY if busy else result)
        return results
