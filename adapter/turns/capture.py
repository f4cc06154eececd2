"""The life of one model call: open its row, which shows whether it is new; generate, complete the row, deliver.

    request ─▶ prompt ─▶ insert row in_flight ─▶ engine (text is shown) ─▶ row completed ─▶ last bytes ─▶ delivered
                               └─ same digest exists ─▶ `retry_or_sample.py`: a new sample, the stored answer,
                                                        the call in flight, or the call of a process that died

A session at its turn limit looks for the digest first. A turn is one row, which several processes change. Its whole
state is `state`, `delivered`, `worker` (the process that generates it; if that process's lease has expired, a row in
flight can be taken over) and `lease_owner` (the process that has a connected client, NULL: none has; no meaning after
that process's lease has expired). A process has one lease for all its turns (`ProcessLease`). "Seal" is closing the
session. The adapter's open and complete lock the session's row against a seal, so after one no turn appears or changes
its tokens; `delivered` may still be set.

    from          to           who makes the transition, and on which condition
    (no row)      in_flight    The process that got the request, which becomes worker and lease owner. Only if the
                               session is open and (session, lane, digest, ordinal) is new: `TurnWriter.open`.
    in_flight     in_flight    Its process notes the engine (`TurnGenerator`), clears the owner if its last client
                               disconnects and sets it if one joins (`TurnRegistry`).
    in_flight     in_flight    The worker's lease has expired, or this process is the worker and does not know it,
                               because the confirmation of a commit was lost: a process with a retry of the call
                               becomes worker and owner, and generates again. Of several processes one succeeds:
                               `RetryResolver`.
    in_flight     completed    Any process that generated it; the first one wins. Only if the session is open. Worker
                               and owner stay as they are: `TurnWriter.complete`.
    in_flight     aborted      The process that inserted it, if the insertion was not confirmed and no task generates
                               the row: `TurnRegistry.open`.
    in_flight     aborted      A process that generates it, after any error except a seal, for example if the engine
                               refuses the call; it clears the owner (`TurnGenerator`). An activity that seals the
                               session: `close_session` (diff) clears the owner and lets the engines abort the calls,
                               `close_sessions` (finalise, sweep, a claim by another workflow run) does neither.
    completed     completed    A process that returns the stored answer, the same one or another, sets the owner, which
                               is cleared as for in_flight. A completed turn is never taken over.
    completed     delivered    The process that wrote the answer's last byte; it clears the owner:
                               `TurnWriter.deliver`. An SDK's retry of a delivered turn gets the stored answer, and
                               delivers it once more.

`completed` and `aborted` are final states of `state`. A turn that is not delivered is context, and is trained only
if a later prompt has its whole answer (`loss_mask.py`).

What a client that reads a stream has seen, and what its retry gets if a process dies or the connection breaks then:

    the turn is   the client has seen      lost: its connection        lost: the adapter     lost: the engine
    (no row)      pings or comments        a new sample                a new sample          -
    in_flight     pings, a beginning of    joins the call, in the      the row is sampled    nothing: the next engine
                  the answer (`live`)      same process; in another    anew; what was seen   continues the tokens
                                           it waits for the stored     is stored nowhere
                                           answer: the same tokens
                                           from their start
    completed     all but the last bytes   the stored answer           the stored answer     -
    delivered     everything               an SDK's retry: the stored answer; any other is a new call

If another process has completed the row with another sample, the stored answer does not begin with what the client has
seen: its stream ends with an error that it should retry, and the retry gets the stored answer. So no answer is
delivered that is not stored, and none is trained of which a client has seen another.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import uuid4

from adapter.auth import UnauthorisedError
from adapter.conversation import Answer, RequestOptions
from adapter.dialects.base import Dialect
from adapter.output_parser import OutputParser
from adapter.prompt.prompt_builder import PreparedCall, PromptBuilder
from adapter.prompt.renderer import Renderer
from adapter.prompt.session_cache import SessionCache
from adapter.settings import AdapterSettings
from adapter.store_outage import StoreOutage
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.generator import TurnGenerator
from adapter.turns.leases import ProcessLease
from adapter.turns.registry import ConnectedClient, TurnRegistry
from adapter.turns.replay import replay
from adapter.turns.retry_actions import RetryResolver, run_shielded
from adapter.turns.routing import EngineRouter
from adapter.turns.writer import TurnWriter
from store.database import Database
from store.sessions import SessionRow


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """A request that was accepted. `task` returns the answer once its turn is committed."""

    options: RequestOptions
    prompt_tokens: int
    client: ConnectedClient
    task: "asyncio.Task[Answer]"


class Capture:
    """The entry points for HTTP; session cache, prompt builder, registry and resolver do the work."""

    def __init__(
        self,
        settings: AdapterSettings,
        database: Database,
        renderer: Renderer,
        outputs: OutputParser,
        router: EngineRouter,
        outage: StoreOutage,
        waits: EngineWaits,
    ) -> None:
        self._writer = TurnWriter(database)
        self._lease = ProcessLease(database, uuid4().hex[:12], settings.lease_seconds)
        self._outage = outage
        self._outputs = outputs
        self._sessions = SessionCache(
            database, renderer, settings.max_sessions, settings.restore_reasoning, outputs.without_inlined_thinking
        )
        self._prompts = PromptBuilder(renderer, router, self._sessions, settings.images)
        generator = self._generator = TurnGenerator(database, renderer, outputs, router, self._writer, waits, outage)
        self._registry = TurnRegistry(database, self._writer, self._lease, waits, outage, generator)
        self._resolver = RetryResolver(database, self._sessions, self._registry, outage)

    async def start(self, row: SessionRow, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> PendingCall:
        """Begin a call, or connect to an earlier one.

        A turn is generated in a task of its own, also after the client has disconnected.

        Raises UnauthorisedError, TurnLimitError, and what `PromptBuilder.prepare` raises. After a
        StoreUnavailableError it may be repeated; the turn itself waits while the store is unavailable. If the caller is
        cancelled while the row is inserted, its turn is generated all the same, and a retry gets its answer.
        """
        session = self._sessions.get(row)
        prepared = _with_model(await self._prompts.prepare(session, body, dialect, headers), row.model)
        if row.endpoint is None:
            self._outputs.take(prepared.request)
        client = ConnectedClient()
        # A session that has had all its turns may still ask again for the answer to one of them.
        replays = row.has_earlier and not row.is_by_hand  # by hand, a person may ask each time for something else
        known = await self._registry.find(session, prepared) if session.at_turn_limit or replays else None
        if known is None and replays and await replay(self._registry.database, session, prepared):
            known = await self._registry.find(session, prepared)
        if known is None:
            try:
                running = await run_shielded(self._registry.open(session, prepared, 0, client))
            except asyncio.CancelledError:
                await self._registry.disconnect(client)
                raise
            if running is not None:
                return PendingCall(prepared.request.options, prepared.stream.length, client, running.task)
        known = known or await self._registry.find(session, prepared)
        if known is None:
            raise UnauthorisedError  # neither inserted nor there already: the session is closed
        task = asyncio.create_task(self._resolver.resolve(session, prepared, known, client))
        task.add_done_callback(_retrieve_exception)
        return PendingCall(prepared.request.options, prepared.stream.length, client, task)

    async def count_tokens(self, row: SessionRow, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> int:
        """Tokens of the prompt that this call would send, sampled ids included."""
        return await self._prompts.count(self._sessions.get(row), body, dialect, headers)

    async def deliver(self, answer: Answer) -> None:
        """Record that the answer's last byte was written, once the store is available."""
        self._registry.end_delivery(answer.turn_id)
        await self._outage.hold(lambda: self._writer.deliver(answer.turn_id))

    async def detach(self, call: PendingCall) -> None:
        """Disconnect a client that has gone or was sent an error.

        Its turn goes on, and a retry gets that turn's answer. A call without a turn is cancelled; a turn that is being
        opened or taken over for it at that moment is generated all the same.
        """
        running = self._registry.get(call.client.turn_id)
        if running is None or running.task is not call.task:  # the resolver's task; it cannot cancel the turn's task
            call.task.cancel()
            await asyncio.wait({call.task})
        await self._registry.disconnect(call.client)

    @property
    def is_busy(self) -> bool:
        return not self._registry.is_empty

    async def close(self) -> None:
        """Stop in order: the lease ends first, so that another process can take over the calls in flight at once."""
        await self._lease.close()
        self._registry.cancel_all()
        await self._generator.close()


def _with_model(prepared: PreparedCall, model: str) -> PreparedCall:
    """The call with the session's model if the client names none: answers say which model made them."""
    request = prepared.request
    if request.options.model:
        return prepared
    return replace(prepared, request=replace(request, options=replace(request.options, model=model)))


def _retrieve_exception(task: "asyncio.Task[Answer]") -> None:
    """Keep asyncio from logging "exception was never retrieved" if the client has disconnected."""
    if not task.cancelled():
        task.exception()
