"""Group commit: what several calls write at the same moment goes into one transaction.

No call continues before its commit.

A commit costs the same for one row as for twenty, and a thousand sessions share one disk. Writes are never delayed to
fill a batch: the first one is written at once, and those that arrive during its commit form the next batch. A session
that is locked (a seal) does not delay the others either: its writes are repeated in a transaction of their own.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.background_task import start_process_task
from ratchet.errors import StoreUnavailableError
from store import turns
from store.database import Database
from store.turns import CompletedTurn, NewTurn

_MAX_BATCH = 64
_BUSY = object()


@dataclass(frozen=True, slots=True)
class _LostOpen:
    """A row whose insertion was not confirmed. `running_ids` changes as turns begin and end."""

    turn: NewTurn
    running_ids: Collection[int]

    @property
    def session_id(self) -> int:
        return self.turn.session_id


_Value = NewTurn | CompletedTurn | _LostOpen | int


@dataclass(frozen=True, slots=True)
class _Write:
    """A row to open, to complete or to abort, or the id of a delivered turn. `result` is set after the commit."""

    value: _Value
    result: "asyncio.Future[Any]"


class TurnWriter:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: list[_Write] = []
        self._task: asyncio.Task[None] | None = None
        self._waiting_for_locks: set[asyncio.Task[None]] = set()

    async def open(self, turn: NewTurn) -> int | None:
        """Insert a row and return its id; None if the session is closed or (lane, digest, ordinal) exists."""
        opened: int | None = await self._write(turn)
        return opened

    async def abort_lost_open(self, turn: NewTurn, running_ids: Collection[int]) -> None:
        """Abort the row of an `open` that failed with StoreUnavailableError, if it was stored all the same.

        `running_ids`: a view of the turns that this process generates. None of them is aborted: it may be open again.
        """
        await self._write(_LostOpen(turn, running_ids))

    async def complete(self, turn: CompletedTurn) -> bool:
        """Complete a row. False if it is not in flight any more or its session is closed."""
        return bool(await self._write(turn))

    async def deliver(self, turn_id: int) -> None:
        """Record that the answer's last byte was written."""
        await self._write(turn_id)

    async def _write(self, value: _Value) -> Any:
        write = _Write(value, asyncio.get_running_loop().create_future())
        self._queue.append(write)
        if self._task is None or self._task.done():
            self._task = start_process_task(self._drain())
        return await write.result

    async def _drain(self) -> None:
        while self._queue:
            batch = self._queue[:_MAX_BATCH]
            self._queue = self._queue[_MAX_BATCH:]
            await self._settle(batch)

    async def _settle(self, batch: Sequence[_Write], wait: bool = False) -> None:
        """Commit a batch and set the results. If it fails because of one write, the others are committed one by one."""
        try:
            results = await self._commit(batch, wait)
        except Exception as error:  # raised where the write was asked for
            if len(batch) > 1 and not isinstance(error, StoreUnavailableError):
                for write in batch:
                    await self._settle([write])
                return
            for write in batch:
                if not write.result.done():
                    write.result.set_exception(error)
            return
        for write, result in zip(batch, results, strict=True):
            if result is _BUSY:
                task = asyncio.create_task(self._settle([write], wait=True))
                self._waiting_for_locks.add(task)
                task.add_done_callback(self._waiting_for_locks.discard)
            elif not write.result.done():
                write.result.set_result(result)

    async def _commit(self, batch: Sequence[_Write], wait: bool) -> list[Any]:
        """Write a batch in one transaction and return one result per write, see `turns.WrittenTurns`.

        Rows to abort, which only an outage leaves, are aborted in an earlier one.

        The result is `_BUSY` for a write that was skipped because its session is locked.
        """
        new = [write.value for write in batch if isinstance(write.value, NewTurn)]
        completed = [write.value for write in batch if isinstance(write.value, CompletedTurn)]
        delivered = [write.value for write in batch if isinstance(write.value, int)]
        lost = [write.value for write in batch if isinstance(write.value, _LostOpen)]
        busy_ids: frozenset[int] = frozenset()
        if lost:  # before the insertions, one of which may be the same call's
            opens = [one.turn for one in lost]
            busy_ids = await self._database.run(turns.abort_lost_opens, opens, lost[0].running_ids, wait)
        written = await turns.write_turns(self._database, new, completed, delivered, wait)
        opened_ids = iter(written.opened)
        were_completed = iter(written.completed)
        results: list[Any] = []
        for write in batch:
            match write.value:
                case NewTurn():
                    result: Any = next(opened_ids)
                case CompletedTurn():
                    result = next(were_completed)
                case _:
                    result = None
            busy_here = busy_ids if isinstance(write.value, _LostOpen) else written.busy
            busy = not isinstance(write.value, int) and write.value.session_id in busy_here
            results.append(_BUSY if busy else result)
        return results
