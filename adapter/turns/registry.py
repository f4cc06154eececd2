"""The turns that this process generates, and the clients that are connected to them.

A turn runs in a task of its own, so that it reaches its end even if every client disconnects; this registry is where a
repeated request finds that task. That a client has joined, or that the last one has left, is also written to the turn's
row, for the other adapter processes.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import structlog

from adapter.auth import UnauthorisedError
from adapter.conversation import Answer
from adapter.live_answer import LiveAnswer
from adapter.prompt.prompt_builder import PreparedCall, TurnLimitError
from adapter.prompt.session_cache import LiveSession
from adapter.store_outage import StoreOutage
from adapter.turns.call_options import CallOptions
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.generator import TurnGenerator
from adapter.turns.leases import ProcessLease
from adapter.turns.records import new_turn
from adapter.turns.writer import TurnWriter
from ratchet.errors import StoreUnavailableError
from store import turns
from store.database import Database
from store.turns import KnownCall

_LOG = structlog.get_logger("ratchet.adapter")


@dataclass(slots=True, eq=False)
class ConnectedClient:
    """One HTTP request that waits for an answer. `turn_id` is None until it is decided which turn answers it.

    `live`: what can be shown of the answer while it is sampled, None if nothing can. `connected`: both are set.
    """

    turn_id: int | None = None
    live: LiveAnswer | None = None
    connected: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def connect(self, turn_id: int, live: LiveAnswer | None) -> None:
        self.turn_id = turn_id
        self.live = live
        if not self.connected.done():
            self.connected.set_result(None)


@dataclass(slots=True)
class RunningTurn:
    """`task` returns the answer once the turn is committed. `options`: those that it is made for."""

    task: "asyncio.Task[Answer]"
    options: CallOptions
    live: LiveAnswer | None = None
    clients: set[ConnectedClient] = field(default_factory=set)


@dataclass(eq=False, repr=False)
class TurnRegistry:
    database: Database
    _writer: TurnWriter
    lease: ProcessLease
    _waits: EngineWaits
    _outage: StoreOutage
    generator: TurnGenerator

    def __post_init__(self) -> None:
        self._running: dict[int, RunningTurn] = {}
        self._aborting: set[asyncio.Task[None]] = set()
        self._delivering: dict[int, set[ConnectedClient]] = {}  # clients to which a stored answer is written, by turn

    @property
    def is_empty(self) -> bool:
        return not self._running

    def get(self, turn_id: int | None) -> RunningTurn | None:
        return None if turn_id is None else self._running.get(turn_id)

    def cancel_all(self) -> None:
        for running in list(self._running.values()):
            running.task.cancel()
        for task in self._aborting:
            task.cancel()

    async def find(self, session: LiveSession, prepared: PreparedCall) -> KnownCall | None:
        """Return the newest turn of this session and lane with the same digest, None without one."""
        found = await self.database.read(turns.find_calls, session.row.id, prepared.lane, prepared.digest, 1)
        return found[0] if found else None

    async def open(
        self, session: LiveSession, prepared: PreparedCall, ordinal: int, client: ConnectedClient
    ) -> RunningTurn | None:
        """Insert an `in_flight` row and generate it; None if it cannot be inserted, see `TurnWriter.open`.

        Raises TurnLimitError if the session has had all its turns. After a StoreUnavailableError the row may be there
        nevertheless; it is aborted once the store is available, because it may never be asked for again, and until this
        process ends all others would take it for a call that is being generated.
        """
        if session.at_turn_limit:
            raise TurnLimitError(session.row.limits["max_turns"] or 0)
        await self.lease.begin()
        turn = new_turn(session.row, prepared, ordinal, self.lease.process_id)
        try:
            turn_id = await self._writer.open(turn)
        except StoreUnavailableError:
            abort = partial(self._writer.abort_lost_open, turn, self._running.keys())
            task = asyncio.create_task(self._outage.hold(abort))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
            raise
        return None if turn_id is None else self.start(session, prepared, turn_id, client)

    def start(self, session: LiveSession, prepared: PreparedCall, turn_id: int, client: ConnectedClient) -> RunningTurn:
        """Generate an `in_flight` row that this process is the worker of. `client` is its first client."""
        live = self.generator.live_answer(session, prepared)
        task = asyncio.create_task(self.generator.generate(session, prepared, turn_id, live))
        running = RunningTurn(task, CallOptions.of(prepared.request.options, prepared.max_tokens), live)
        self._running[turn_id] = running
        session.num_calls += 1
        self._waits.add(turn_id, session.row.id)
        task.add_done_callback(lambda task: self._finish(session, turn_id, running, task))
        self.connect(running, turn_id, client)
        return running

    def _finish(self, session: LiveSession, turn_id: int, running: RunningTurn, task: "asyncio.Task[Answer]") -> None:
        self._running.pop(turn_id, None)
        session.num_calls -= 1
        self._waits.remove(turn_id)
        error = None if task.cancelled() else task.exception()
        if running.clients and error is None and not task.cancelled():
            self._delivering[turn_id] = running.clients
        elif error is not None and not running.clients and not isinstance(error, UnauthorisedError):
            _LOG.error("a turn without a client failed", turn=turn_id, exc_info=error)

    def connect(self, running: RunningTurn, turn_id: int, client: ConnectedClient, same_view: bool = True) -> None:
        """Add a client to a turn. One with another view of the tokens is shown nothing before they are all there."""
        client.connect(turn_id, running.live if same_view else None)
        running.clients.add(client)

    def connect_to_stored(self, turn_id: int, client: ConnectedClient) -> None:
        """Register a client that gets the stored answer."""
        client.connect(turn_id, None)
        running = self._running.get(turn_id)  # committed, but its task has not ended yet
        clients = self._delivering.setdefault(turn_id, set()) if running is None else running.clients
        clients.add(client)

    def end_delivery(self, turn_id: int) -> None:
        """Forget the clients of an answer that was delivered, or whose last client has disconnected."""
        self._delivering.pop(turn_id, None)

    async def record_connection(self, turn_id: int) -> None:
        """Write to the row that a client of this process waits for its answer."""
        await self.database.run(turns.attach_client, turn_id, self.lease.process_id)

    async def disconnect(self, client: ConnectedClient) -> None:
        """Remove a client. If it was the last one, write to the row that no client of this process waits any more."""
        turn_id = client.turn_id
        if turn_id is None:
            return
        self._clients(turn_id).discard(client)
        if not self._clients(turn_id):
            if turn_id not in self._running:
                self.end_delivery(turn_id)
            await self._outage.hold(lambda: self._record_disconnection(turn_id))

    async def _record_disconnection(self, turn_id: int) -> None:
        if self._clients(turn_id):
            return  # another one has come while the store was unavailable
        await self.database.run(turns.mark_detached, turn_id, self.lease.process_id)

    def _clients(self, turn_id: int) -> set[ConnectedClient]:
        running = self._running.get(turn_id)
        return self._delivering.get(turn_id, set()) if running is None else running.clients
