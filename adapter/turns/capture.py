"""The life of one model call: recognise it, open its row, generate, complete the row, hand the answer out.

Why here: everything that makes a call durable and counted once is one story; it reads from top to bottom.
Called by: `app.py`. `start` is called per request; the call itself goes on in a task of its own, whatever its client does.

    request ─▶ exact prompt ─▶ same digest known? ─no─▶ row in_flight ─▶ engine ─▶ row completed ─▶ bytes ─▶ delivered
                                     └─ retry ─▶ the stored answer, the call in flight, or the call of a dead process
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

import structlog

from adapter.auth import UnauthorisedError
from adapter.conversation import Answer, RequestOptions, answer_from_json
from adapter.dialects.base import Dialect
from adapter.output_parser import OutputParser
from adapter.prompt.prompt_builder import LiveSession, PreparedCall, PromptBuilder, TurnLimitError
from adapter.prompt.renderer import Renderer
from adapter.settings import AdapterSettings
from adapter.turns.leases import Leases
from adapter.turns.records import completed_turn, lane_key, new_turn
from adapter.turns.retries import RetryDecision, decide_retry
from adapter.turns.routing import EngineRouter
from adapter.turns.tree import AttachPoint, TurnGrowth
from adapter.turns.writer import TurnWriter
from engine.client import Generation, Sampling
from ratchet.errors import EngineUnavailableError, StoreUnavailableError
from ratchet.store import turns
from ratchet.store.arrays import ids_from_bytes, unpack_json
from ratchet.store.database import Database
from ratchet.store.sessions import SessionRow, request_id
from ratchet.store.turns import KnownCall
from ratchet.types import TurnState

_LOG = structlog.get_logger("ratchet.adapter")
_POLL_SECONDS = 0.2

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class PendingCall:
    """One client's hold on a call. `task` yields the answer once the turn is committed; `turn_id` None: which turn that is is not known
    yet."""

    wishes: RequestOptions
    prompt_tokens: int
    task: "asyncio.Task[Answer]"
    turn_id: int | None = None


@dataclass(slots=True)
class RunningTurn:
    """A turn that this process generates. It runs to its end, with or without clients."""

    task: "asyncio.Task[Answer]"
    clients: set[PendingCall] = field(default_factory=set)


class Capture:
    def __init__(
        self,
        settings: AdapterSettings,
        database: Database,
        renderer: Renderer,
        outputs: OutputParser,
        router: EngineRouter,
    ) -> None:
        self._settings, self._database, self._renderer, self._outputs, self._router = (
            settings,
            database,
            renderer,
            outputs,
            router,
        )
        self._prompts = PromptBuilder(settings, database, renderer, router)
        self._running: dict[int, RunningTurn] = {}
        self._owed: set[asyncio.Task[None]] = set()
        self._process = uuid4().hex[:12]
        self._writer = TurnWriter(database, settings.lease_seconds)
        self.leases = Leases(database, settings.lease_seconds, router)

    # ------------------------------------------------------------ entry points

    async def start(
        self, session: SessionRow, body: bytes, dialect: Dialect, headers: Mapping[str, str]
    ) -> PendingCall:
        """Begins or joins a call. Raises UnauthorisedError, TurnLimitError, and what `PromptBuilder.prepare` raises."""
        live = self._prompts.live(session)
        prepared = await self._prompts.prepare(live, body, dialect, headers)
        wishes = prepared.reading.wishes
        # A session that has had all its turns may still ask again for the answer to one of them.
        known = await self._find(live, prepared) if live.spent else None
        if known is None and (turn_id := await self._open(live, prepared, 0)) is not None:
            running = self._begin(live, prepared, turn_id)
            pending = PendingCall(wishes, prepared.stream.length, running.task, turn_id)
            running.clients.add(pending)
            return pending
        known = known or await self._find(live, prepared)
        if known is None:
            raise UnauthorisedError  # neither inserted nor there: the session is closed
        hold: asyncio.Future[PendingCall] = asyncio.get_running_loop().create_future()
        pending = PendingCall(
            wishes, prepared.stream.length, asyncio.create_task(self._resolve(live, prepared, known, hold))
        )
        pending.task.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # seen, even if the client has gone
        hold.set_result(pending)
        return pending

    async def count_tokens(self, session: SessionRow, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> int:
        """Tokens of the prompt that this call would send, sampled ids included."""
        return await self._prompts.count(self._prompts.live(session), body, dialect, headers)

    async def delivered(self, answer: Answer) -> None:
        """The last byte was written. Without this mark the turn is context only: where the store is away, it is made later."""
        self.leases.drop(answer.turn_id)
        try:
            await self._writer.delivered(answer.turn_id)
        except StoreUnavailableError as error:
            _LOG.warning("delivery not recorded yet", turn=answer.turn_id, reason=str(error))
            task = asyncio.create_task(self._record_delivery(answer.turn_id))
            self._owed.add(task)
            task.add_done_callback(self._owed.discard)

    async def _record_delivery(self, turn_id: int) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            with contextlib.suppress(StoreUnavailableError):
                return await self._writer.delivered(turn_id)

    async def detach(self, pending: PendingCall) -> None:
        """The client has gone, or was told that its call failed. A turn goes on, and the client's retry gets its answer; what was not a
        turn yet becomes none."""
        running = self._running.get(pending.turn_id or 0)
        if (
            running is None or running.task is not pending.task
        ):  # it tells calls apart, or waits for the turn's own task
            pending.task.cancel()
            await asyncio.wait({pending.task})
        if pending.turn_id is None:
            return
        running = self._running.get(pending.turn_id)
        if running is None:
            self.leases.drop(pending.turn_id)
        else:
            running.clients.discard(pending)
            if running.clients:
                return
        try:
            async with self._database.begin() as conn:
                await turns.mark_detached(conn, pending.turn_id, self._process)
        except StoreUnavailableError as error:
            _LOG.warning("lost client not recorded", turn=pending.turn_id, reason=str(error))

    @property
    def busy(self) -> bool:
        """Whether a call is being generated."""
        return bool(self._running)

    async def close(self) -> None:
        """Stops in order: calls in flight may be taken over by another process at once."""
        await self.leases.close()
        for running in list(self._running.values()):
            running.task.cancel()

    # ------------------------------------------------------------ a new call, or a retry

    async def _open(self, live: LiveSession, prepared: PreparedCall, ordinal: int) -> int | None:
        """See `TurnWriter.open`. Raises TurnLimitError where the session has had all its turns."""
        if live.spent:
            raise TurnLimitError(live.session.limits["max_turns"])
        return await self._writer.open(new_turn(live.session, prepared, ordinal, self._process))

    async def _find(self, live: LiveSession, prepared: PreparedCall) -> KnownCall | None:
        async with self._database.begin() as conn:
            return await turns.find_call(conn, live.session.id, lane_key(prepared.lane), prepared.digest)

    def _begin(self, live: LiveSession, prepared: PreparedCall, turn_id: int) -> RunningTurn:
        running = RunningTurn(asyncio.create_task(self._run(live, prepared, turn_id)))
        self._running[turn_id] = running
        live.num_calls += 1
        self.leases.hold(turn_id, live.session.id)
        running.task.add_done_callback(lambda task: self._ended(live, turn_id, running, task))
        return running

    def _ended(self, live: LiveSession, turn_id: int, running: RunningTurn, task: "asyncio.Task[Answer]") -> None:
        self._running.pop(turn_id, None)
        live.num_calls -= 1
        if not running.clients or task.cancelled() or task.exception() is not None:
            self.leases.drop(turn_id)  # else the lease is held until the answer is delivered

    async def _resolve(
        self, live: LiveSession, prepared: PreparedCall, known: KnownCall, hold: "asyncio.Future[PendingCall]"
    ) -> Answer:
        pending, retry = await hold, prepared.reading.wishes.retry
        deadline = time.monotonic() + self._settings.lease_seconds + _POLL_SECONDS
        while True:
            running = self._running.get(known.id)
            clients_here = None if running is None else len(running.clients)
            match decide_retry(
                known, clients_here, known.lease_owner == self._process, retry, time.monotonic() < deadline
            ):
                case RetryDecision.AGAIN:
                    return await self._answered(await _unbroken(self._again(live, prepared, known, pending)))
                case RetryDecision.STORED:
                    return await self._stored(known, pending)
                case RetryDecision.JOIN:
                    assert running is not None
                    return await self._answered(await _unbroken(self._join(running, known, pending)))
                case RetryDecision.TAKE_OVER:
                    taken = await _unbroken(self._take_over(live, prepared, known, pending))
                    if taken is not None:
                        return await self._answered(taken)
            await asyncio.sleep(_POLL_SECONDS)
            async with self._database.begin() as conn:
                latest = await turns.get_call(conn, known.id)
            if latest is None:
                raise UnauthorisedError
            known = latest

    async def _answered(self, running: RunningTurn) -> Answer:
        """The turn is not this client's alone: it goes on when the client does not."""
        return await asyncio.shield(running.task)

    async def _again(
        self, live: LiveSession, prepared: PreparedCall, known: KnownCall, pending: PendingCall
    ) -> RunningTurn:
        while True:
            turn_id = await self._open(live, prepared, known.ordinal + 1)
            if turn_id is not None:
                return self._serve(self._begin(live, prepared, turn_id), turn_id, pending)
            latest = await self._find(live, prepared)
            if latest is None or latest.ordinal == known.ordinal:
                raise UnauthorisedError  # the session is closed
            known = latest

    async def _join(self, running: RunningTurn, known: KnownCall, pending: PendingCall) -> RunningTurn:
        self._serve(running, known.id, pending)
        await self._attach(known)
        return running

    def _serve(self, running: RunningTurn, turn_id: int, pending: PendingCall) -> RunningTurn:
        """This client has the turn from now on; `detach` ends it."""
        pending.turn_id = turn_id
        running.clients.add(pending)
        return running

    async def _attach(self, known: KnownCall) -> None:
        async with self._database.begin() as conn:
            await turns.attach_client(conn, known.id, self._process, self._settings.lease_seconds)

    async def _stored(self, known: KnownCall, pending: PendingCall | None) -> Answer:
        assert known.answer is not None
        if pending is not None:
            pending.turn_id = known.id
            await _unbroken(self._attach(known))
        value = unpack_json(known.answer)
        assert isinstance(value, dict)
        return answer_from_json(known.id, value)

    async def _take_over(
        self, live: LiveSession, prepared: PreparedCall, known: KnownCall, pending: PendingCall
    ) -> RunningTurn | None:
        """The process that held this call is dead: generate for its row, from the prompt that the row recorded. None where another
        process was faster."""
        async with self._database.begin() as conn:
            if not await turns.take_over_turn(conn, known.id, self._process, self._settings.lease_seconds):
                return None
            stored = await turns.load_prompt(conn, known.id)
        assert stored is not None
        parent, kept, suffix = stored
        if parent is not None and parent not in live.tree.nodes:
            await self._prompts.load(live)
        prepared.join = AttachPoint(parent, kept)
        prepared.stream = live.tree.prompt(prepared.join, ids_from_bytes(suffix))
        prepared.engine_id = None
        return self._serve(self._begin(live, prepared, known.id), known.id, pending)

    # ------------------------------------------------------------ generation

    async def _run(self, live: LiveSession, prepared: PreparedCall, turn_id: int) -> Answer:
        """From the open row to the committed one, or to an aborted one. Runs to its end even if every client goes."""
        try:
            return await self._made(live, prepared, turn_id)
        except (
            UnauthorisedError,
            StoreUnavailableError,
        ):  # sealed; or the row's lease runs out, and whoever asks again takes it over
            raise
        except Exception:
            async with self._database.begin() as conn:
                await turns.abort_turn(conn, turn_id)
            raise

    async def _made(self, live: LiveSession, prepared: PreparedCall, turn_id: int) -> Answer:
        started = time.monotonic()
        generation, engine_id = await self._generate(live, prepared, turn_id)
        if not generation.logprobs_valid:
            _LOG.error(
                "logprobs are incomplete or clamped: the turn is kept and not trained", turn=turn_id, engine=engine_id
            )
        ids = generation.token_ids
        text = self._outputs.text(ids[:-1] if self._renderer.stopped(ids) else ids)
        output = await self._outputs.read(text, prepared.reading, self._renderer.stopped(ids))
        num_reasoning = await self._outputs.reasoning_tokens(ids, output)
        answer = Answer(
            turn_id,
            output.message,
            output.finish,
            prepared.stream.length,
            len(ids),
            int(time.time()),
            generation.num_cached_tokens,
            output.stop_sequence,
            self._renderer.thinks(output.message),
            num_reasoning,
        )
        if await self._complete(live, answer, generation, engine_id):
            ended, thinks = self._renderer.ended(ids), prepared.thinks or answer.thinks
            grown = TurnGrowth(prepared.new_keys, answer.message, prepared.lane, prepared.kind, ended, thinks)
            live.tree.add(turn_id, prepared.join, prepared.stream, ids, grown)
            _LOG.debug("turn", id=turn_id, tokens=len(ids), seconds=round(time.monotonic() - started, 3))
            return answer
        async with self._database.begin() as conn:
            known = await turns.get_call(conn, turn_id)
        if known is None or known.state is not TurnState.COMPLETED or known.answer is None:
            raise UnauthorisedError  # sealed meanwhile
        return await self._stored(known, None)

    async def _generate(self, live: LiveSession, prepared: PreparedCall, turn_id: int) -> tuple[Generation, int]:
        """Asks engines until one answers. Raises UnauthorisedError when the session is sealed meanwhile."""
        sampling = Sampling(prepared.max_tokens, live.session.temperature, self._renderer.stop_ids)
        while True:
            engine = await self._router.pick(live.session.id)
            if engine.id != prepared.engine_id:
                prepared.engine_id = engine.id
                async with self._database.begin() as conn:
                    await turns.set_engine(conn, turn_id, engine.id)
            self.leases.runs_on(turn_id, engine.id)
            wire = live.wire.of(prepared.stream, prepared.lane)
            ask = asyncio.create_task(
                self._router.client(engine).generate(wire, sampling, request_id(turn_id), engine.version)
            )
            gone = asyncio.create_task(self._router.wait_until_gone(engine.id))
            try:
                await asyncio.wait({ask, gone}, return_when=asyncio.FIRST_COMPLETED)
                if ask.done() and (generation := ask.result()).finish_reason != "abort":
                    return generation, engine.id
            except EngineUnavailableError as error:
                _LOG.info("engine lost, asking another", turn=turn_id, reason=str(error)[:200])
            finally:
                ask.cancel()
                gone.cancel()
                self.leases.runs_on(turn_id, None)
            self._router.avoid(engine.id)
            async with self._database.begin() as conn:
                known = await turns.get_call(conn, turn_id)
            if known is None or known.state is TurnState.ABORTED:
                raise UnauthorisedError

    async def _complete(self, live: LiveSession, answer: Answer, generation: Generation, engine_id: int) -> bool:
        done = completed_turn(live.session, answer, generation, engine_id, self.leases.waited(answer.turn_id))
        while True:
            try:
                return await self._writer.complete(done)
            except StoreUnavailableError as error:  # the sample is paid for: keep it until the store is back
                _LOG.warning("turn not stored yet", turn=done.id, reason=str(error))
                await asyncio.sleep(_POLL_SECONDS)


async def _unbroken(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs to its end even if the caller is cancelled, who learns of it then: a row that was made ours and is not generated would be in
    flight for nobody."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
