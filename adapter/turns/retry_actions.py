"""Answer a request that has the digest of an earlier call: a new sample, the stored answer, or the call in flight.

`retry_or_sample.py` makes the decision; this class carries it out and asks again until the decision is final.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from adapter.auth import UnauthorisedError
from adapter.conversation import Answer
from adapter.prompt.prompt_builder import PreparedCall
from adapter.prompt.session_cache import LiveSession, SessionCache
from adapter.store_outage import StoreOutage
from adapter.turns.call_options import CallOptions, fits
from adapter.turns.records import stored_answer
from adapter.turns.registry import ConnectedClient, RunningTurn, TurnRegistry
from adapter.turns.retry_or_sample import RetryDecision, decide_retry
from adapter.turns.stored_views import store_view
from adapter.turns.tree import AttachPoint
from ratchet.background_task import wait_for_end
from ratchet.types import TurnState
from store import turns
from store.arrays import ids_from_bytes
from store.database import Database
from store.turns import KnownCall

_POLL_SECONDS = 0.2
_MOST_EQUAL_CALLS = 64
"""The number of calls with the same digest that are searched, the newest ones."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """A call, with what this process knows of it. `answer`: if it is completed. `made_for`: None if not known."""

    call: KnownCall
    running: RunningTurn | None
    answer: Answer | None
    made_for: CallOptions | None

    @classmethod
    def of(cls, call: KnownCall, registry: TurnRegistry) -> "EarlierCall":
        running = registry.get(call.id)
        answer = stored_answer(call) if call.state is TurnState.COMPLETED else None
        asked = None if answer is None else answer.asked
        stored = None if asked is None else CallOptions.from_json(asked)
        return cls(call, running, answer, stored if running is None else running.options)

    def has_key(self, call_key: str) -> bool:
        return bool(call_key) and self.made_for is not None and self.made_for.call_key == call_key


class RetryResolver:
    def __init__(self, database: Database, sessions: SessionCache, registry: TurnRegistry, outage: StoreOutage) -> None:
        self._database = database
        self._sessions = sessions
        self._registry = registry
        self._outage = outage

    async def resolve(
        self, session: LiveSession, prepared: PreparedCall, known: KnownCall, client: ConnectedClient
    ) -> Answer:
        """Connect `client` to the turn that answers it, and return that turn's answer.

        Waits while the store is unavailable. Raises UnauthorisedError if the session is closed and the turn has no
        stored answer, TurnLimitError if a new sample would exceed the limit of turns, and what generation raises. If
        the caller is cancelled, a turn that was made or taken over for it is generated all the same.
        """
        options = prepared.request.options
        asked = CallOptions.of(options, prepared.max_tokens)
        deadline = time.monotonic() + self._registry.lease.lease_seconds + _POLL_SECONDS

        newest = known
        of_key = partial(_call_of_key, self._database, self._registry, session.row.id, prepared, newest)
        known = await self._outage.hold(of_key)
        while True:
            earlier = EarlierCall.of(known, self._registry)
            running, answer = earlier.running, earlier.answer
            same_view = earlier.made_for is None or earlier.made_for.view == asked.view
            is_sdk_retry = options.retry or earlier.has_key(asked.call_key)
            can_answer = fits(earlier.made_for, asked, answer, session.row.endpoint is not None)
            match self._decide(earlier, is_sdk_retry, time.monotonic() < deadline, can_answer):
                case RetryDecision.AGAIN:
                    return await self._wait(await run_shielded(self._sample_again(session, prepared, newest, client)))
                case RetryDecision.STORED:
                    self._registry.connect_to_stored(known.id, client)
                    await run_shielded(self._outage.hold(partial(self._registry.record_connection, known.id)))
                    assert answer is not None
                    return await self._viewed(session, prepared, answer, same_view)
                case RetryDecision.JOIN:
                    assert running is not None
                    joined = await run_shielded(self._join(running, known, client, same_view))
                    return await self._viewed(session, prepared, await self._wait(joined), same_view)
                case RetryDecision.TAKE_OVER:
                    taken = await run_shielded(
                        self._outage.hold(partial(self._take_over, session, prepared, known, client))
                    )
                    if taken is not None:
                        return await self._wait(taken)
            await asyncio.sleep(_POLL_SECONDS)
            latest = await self._outage.hold(partial(self._database.run, turns.get_call, known.id))
            if latest is None:
                raise UnauthorisedError
            known = latest

    def _decide(self, earlier: EarlierCall, is_sdk_retry: bool, in_time: bool, fitting: bool) -> RetryDecision:
        known = earlier.call
        num_clients_here = None if earlier.running is None else len(earlier.running.clients)
        in_flight = known.state is TurnState.IN_FLIGHT
        is_own = (known.worker if in_flight else known.lease_owner) == self._registry.lease.process_id
        return decide_retry(known, num_clients_here, is_own, is_sdk_retry, in_time, fitting)

    async def _wait(self, running: RunningTurn) -> Answer:
        """Wait for the turn's answer. Cancelling this client does not cancel the turn, which may have other clients."""
        return await asyncio.shield(running.task)

    async def _sample_again(
        self, session: LiveSession, prepared: PreparedCall, known: KnownCall, client: ConnectedClient
    ) -> RunningTurn:
        """Open a row with the next ordinal and generate it; the one after if another process inserts that first."""
        while True:
            opening = partial(self._registry.open, session, prepared, known.ordinal + 1, client)
            if (running := await self._outage.hold(opening)) is not None:
                return running
            latest = await self._outage.hold(partial(self._registry.find, session, prepared))
            if latest is None or latest.ordinal == known.ordinal:
                raise UnauthorisedError  # nothing was inserted because the session is closed
            known = latest

    async def _viewed(self, session: LiveSession, prepared: PreparedCall, answer: Answer, same_view: bool) -> Answer:
        """The answer as the request's options show it."""
        if not prepared.request.options.logprobs:
            answer = replace(answer, logprobs=())
        if same_view:
            return answer
        if answer.turn_id not in session.tree.nodes:
            await self._outage.hold(partial(self._sessions.load, session))
        viewed = await self._registry.generator.viewed(session, prepared, answer)
        if viewed.message != answer.message:
            await self._outage.hold(lambda: self._database.run(store_view, answer.turn_id, viewed.message))
        return viewed

    async def _join(
        self, running: RunningTurn, known: KnownCall, client: ConnectedClient, same_view: bool
    ) -> RunningTurn:
        self._registry.connect(running, known.id, client, same_view)
        await self._outage.hold(partial(self._registry.record_connection, known.id))
        return running

    async def _take_over(
        self, session: LiveSession, prepared: PreparedCall, known: KnownCall, client: ConnectedClient
    ) -> RunningTurn | None:
        """Generate a row that no task generates, from the prompt that the row recorded.

        Its process has died, or it is ours and the confirmation was lost. None if another process took it first, or
        another request of this one.
        """
        await self._registry.lease.begin()
        async with self._database.begin() as conn:
            if not await turns.take_over_turn(conn, known.id, self._registry.lease.process_id):
                return None
            stored = await turns.load_prompt(conn, known.id)
        assert stored is not None
        if stored.parent_turn_id is not None and stored.parent_turn_id not in session.tree.nodes:
            await self._sessions.load(session)
        attach_point = AttachPoint(stored.parent_turn_id, stored.kept_tokens)
        stream = session.tree.prompt(attach_point, ids_from_bytes(stored.suffix_ids))
        if self._registry.get(known.id) is not None:
            return None
        recorded = replace(prepared, attach_point=attach_point, stream=stream, engine_id=None)
        return self._registry.start(session, recorded, known.id, client)


async def run_shielded(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` to its end even if the caller is cancelled meanwhile, and raise the cancellation afterwards.

    Without this, a cancelled client could leave a row that this process has the lease of and that no task generates.
    """
    task = asyncio.create_task(work)
    await wait_for_end(task)
    return task.result()


async def _call_of_key(
    database: Database, registry: TurnRegistry, session_id: int, prepared: PreparedCall, newest: KnownCall
) -> KnownCall:
    """Return the call with the request's `Idempotency-Key` among those with the digest of `newest`, else `newest`."""
    call_key = prepared.request.options.call_key
    if not call_key or newest.ordinal == 0 or EarlierCall.of(newest, registry).has_key(call_key):
        return newest
    found = await database.read(turns.find_calls, session_id, prepared.lane, prepared.digest, _MOST_EQUAL_CALLS)
    return next((one for one in found if EarlierCall.of(one, registry).has_key(call_key)), newest)
