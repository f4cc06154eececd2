"""The life of one model call: recognise it, open its row, generate, complete the row, hand the answer out.

Why here: everything that makes a call durable and counted once is one story; it reads from top to bottom.
Called by: `app.py`. `start` is called per request; the call itself goes on in a task of its own, whatever its client does.

    request ─▶ exact prompt ─▶ same digest known? ─no─▶ row in_flight ─▶ engine ─▶ row completed ─▶ bytes ─▶ delivered
                                     └─ retry ─▶ the stored answer, the call in flight, or the call of a dead process
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from uuid import uuid4

import structlog

from adapter.conversation import Answer, Wishes, answer_from_json, answer_to_json, message_to_json
from adapter.dialects.base import Dialect
from adapter.leases import Leases
from adapter.outputs import Outputs
from adapter.prompts import Live, Prepared, Prompts
from adapter.rendering import Renderer
from adapter.routing import Router
from adapter.sessions import UnauthorisedError
from adapter.settings import AdapterSettings
from adapter.tree import Grown, Join
from adapter.writer import Writer
from ratchet.engine_client import Generation, Sampling
from ratchet.errors import EngineRejectedError, EngineUnavailableError, StoreUnavailableError
from ratchet.store import turns
from ratchet.store.arrays import ids_from_bytes, ids_to_bytes, logprobs_to_bytes, pack_json, unpack_json
from ratchet.store.database import Database
from ratchet.store.sessions import SessionRow, request_id
from ratchet.store.turns import CompletedTurn, KnownCall, NewTurn
from ratchet.types import TurnState

LOG = structlog.get_logger("ratchet.adapter")
_POLL_SECONDS = 0.2
_LANE_CHARS = 100


@dataclass(slots=True)
class Running:
    """A turn that this process generates. It runs to its end, with or without clients."""

    task: "asyncio.Task[Answer]"
    num_clients: int = 1


@dataclass(slots=True)
class Pending:
    """One client's hold on a turn. `task` yields the answer once the turn is committed."""

    wishes: Wishes
    prompt_tokens: int
    task: "asyncio.Task[Answer]"
    turn_id: int | None = None


class Capture:
    def __init__(self, settings: AdapterSettings, database: Database, renderer: Renderer, outputs: Outputs, router: Router) -> None:
        self._settings, self._database, self._renderer, self._outputs, self._router = settings, database, renderer, outputs, router
        self._prompts = Prompts(settings, database, renderer, router)
        self._running: dict[int, Running] = {}
        self._owed: set[asyncio.Task[None]] = set()
        self._process = uuid4().hex[:12]
        self._writer = Writer(database, settings.lease_seconds)
        self.leases = Leases(self._writer, settings.lease_seconds, router)

    # ------------------------------------------------------------ entry points

    async def start(self, session: SessionRow, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> Pending:
        """Begins or joins a call. Raises UnauthorisedError, and what `Prompts.prepare` raises."""
        live = self._prompts.live(session)
        prepared = await self._prompts.prepare(live, body, dialect, headers)
        wishes = prepared.reading.wishes
        turn_id = await self._open(live, prepared, 0)
        if turn_id is not None:
            return Pending(wishes, prepared.stream.length, self._begin(live, prepared, turn_id).task, turn_id)
        known = await self._find(live, prepared)
        if known is None:
            raise UnauthorisedError  # neither inserted nor there: the session is closed
        hold: asyncio.Future[Pending] = asyncio.get_running_loop().create_future()
        pending = Pending(wishes, prepared.stream.length, asyncio.create_task(self._resolve(live, prepared, known, hold)))
        pending.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, even if the client has gone
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
            LOG.warning("delivery not recorded yet", turn=answer.turn_id, reason=str(error))
            task = asyncio.create_task(self._record_delivery(answer.turn_id))
            self._owed.add(task)
            task.add_done_callback(self._owed.discard)

    async def _record_delivery(self, turn_id: int) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            with contextlib.suppress(StoreUnavailableError):
                return await self._writer.delivered(turn_id)

    async def detach(self, pending: Pending) -> None:
        """The client has gone. The turn goes on, and the client's retry gets its answer; what was not a turn yet becomes none."""
        if pending.turn_id is None:
            pending.task.cancel()
            return
        running = self._running.get(pending.turn_id)
        if running is None:
            self.leases.drop(pending.turn_id)
        else:
            running.num_clients -= 1
            if running.num_clients > 0:
                return
        try:
            async with self._database.begin() as conn:
                await turns.mark_detached(conn, pending.turn_id, self._process)
        except StoreUnavailableError as error:
            LOG.warning("lost client not recorded", turn=pending.turn_id, reason=str(error))

    async def close(self) -> None:
        """Stops in order: calls in flight may be taken over by another process at once."""
        await self.leases.close()
        for running in list(self._running.values()):
            running.task.cancel()

    # ------------------------------------------------------------ a new call, or a retry

    async def _open(self, live: Live, prepared: Prepared, ordinal: int) -> int | None:
        session, join, reading = live.session, prepared.join, prepared.reading
        turn = NewTurn(
            session_id=session.id,
            rollout_id=session.rollout_id,
            attempt=session.attempt,
            lane=_lane(prepared.lane),
            digest=prepared.digest,
            ordinal=ordinal,
            kind=prepared.kind,
            parent_turn_id=join.parent_turn_id,
            kept_tokens=join.kept_tokens,
            fork_cause=prepared.fork_cause,
            dialect=reading.wishes.dialect,
            prompt_tokens=prepared.stream.length,
            suffix_ids=ids_to_bytes(prepared.suffix),
            temperature=session.temperature,
            request=pack_json(_request(prepared)),
            engine_id=prepared.engine_id,
            lease_owner=self._process,
        )
        return await self._writer.open(turn)

    async def _find(self, live: Live, prepared: Prepared) -> KnownCall | None:
        async with self._database.begin() as conn:
            return await turns.find_call(conn, live.session.id, _lane(prepared.lane), prepared.digest)

    def _begin(self, live: Live, prepared: Prepared, turn_id: int) -> Running:
        running = Running(asyncio.create_task(self._run(live, prepared, turn_id)))
        self._running[turn_id] = running
        live.num_calls += 1
        self.leases.hold(turn_id, live.session.id)
        running.task.add_done_callback(lambda task: self._ended(live, turn_id, running, task))
        return running

    def _ended(self, live: Live, turn_id: int, running: Running, task: "asyncio.Task[Answer]") -> None:
        self._running.pop(turn_id, None)
        live.num_calls -= 1
        if running.num_clients <= 0 or task.cancelled() or task.exception() is not None:
            self.leases.drop(turn_id)  # else the lease is held until the answer is delivered

    async def _resolve(self, live: Live, prepared: Prepared, known: KnownCall, hold: "asyncio.Future[Pending]") -> Answer:
        """A known digest is a retry only if its earlier client is gone, its answer was not written to the last byte, or the SDK
        says so. A client that hangs on another process shows by its lease being renewed."""
        pending, retry = await hold, prepared.reading.wishes.retry
        deadline = time.monotonic() + self._settings.lease_seconds + _POLL_SECONDS
        while True:
            running = self._running.get(known.id)
            attached = running.num_clients > 0 if running is not None else known.attached
            if known.state is TurnState.ABORTED or (known.delivered and not retry):
                return await self._again(live, prepared, known, pending)
            if attached and not retry:
                ours = running is not None or known.lease_owner == self._process
                if ours or time.monotonic() > deadline:
                    return await self._again(live, prepared, known, pending)
            elif known.state is TurnState.COMPLETED:
                return await self._stored(known, pending)
            elif running is not None:
                return await self._join(running, known, pending)
            elif not known.leased and await self._take_over(known):
                return await self._rerun(live, prepared, known, pending)
            await asyncio.sleep(_POLL_SECONDS)
            async with self._database.begin() as conn:
                latest = await turns.get_call(conn, known.id)
            if latest is None:
                raise UnauthorisedError
            known = latest

    async def _again(self, live: Live, prepared: Prepared, known: KnownCall, pending: Pending) -> Answer:
        """The same request once more, meant as such: a new sample in a row of its own."""
        while True:
            turn_id = await self._open(live, prepared, known.ordinal + 1)
            if turn_id is not None:
                pending.turn_id = turn_id
                return await asyncio.shield(self._begin(live, prepared, turn_id).task)
            latest = await self._find(live, prepared)
            if latest is None or latest.ordinal == known.ordinal:
                raise UnauthorisedError  # the session is closed
            known = latest

    async def _join(self, running: Running, known: KnownCall, pending: Pending) -> Answer:
        running.num_clients += 1
        pending.turn_id = known.id
        async with self._database.begin() as conn:
            await turns.attach(conn, known.id, self._process, self._settings.lease_seconds)
        return await asyncio.shield(running.task)

    async def _stored(self, known: KnownCall, pending: Pending | None) -> Answer:
        assert known.answer is not None
        if pending is not None:
            pending.turn_id = known.id
            async with self._database.begin() as conn:
                await turns.attach(conn, known.id, self._process, self._settings.lease_seconds)
        value = unpack_json(known.answer)
        assert isinstance(value, dict)
        return answer_from_json(known.id, value)

    async def _take_over(self, known: KnownCall) -> bool:
        async with self._database.begin() as conn:
            return await turns.take_over(conn, known.id, self._process, self._settings.lease_seconds)

    async def _rerun(self, live: Live, prepared: Prepared, known: KnownCall, pending: Pending) -> Answer:
        """The process that held this call is dead: generate for its row, from the prompt that the row recorded."""
        async with self._database.begin() as conn:
            stored = await turns.load_prompt(conn, known.id)
        assert stored is not None
        parent, kept, suffix = stored
        if parent is not None and parent not in live.tree.nodes:
            await self._prompts.load(live)
        prepared.join = Join(parent, kept)
        prepared.stream = live.tree.prompt(prepared.join, ids_from_bytes(suffix))
        prepared.engine_id = None
        pending.turn_id = known.id
        return await asyncio.shield(self._begin(live, prepared, known.id).task)

    # ------------------------------------------------------------ generation

    async def _run(self, live: Live, prepared: Prepared, turn_id: int) -> Answer:
        """From the open row to the committed one. Runs to its end even if every client goes."""
        started = time.monotonic()
        try:
            generation, engine_id = await self._generate(live, prepared, turn_id)
        except EngineRejectedError:
            async with self._database.begin() as conn:
                await turns.abort_turn(conn, turn_id)
            raise
        if not generation.logprobs_valid:
            LOG.error("logprobs are incomplete or clamped: the turn is kept and not trained", turn=turn_id, engine=engine_id)
        ids = generation.token_ids
        text = self._outputs.text(ids[:-1] if self._renderer.stopped(ids) else ids)
        output = await self._outputs.read(text, prepared.reading, self._renderer.stopped(ids))
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
            self._outputs.reasoning_tokens(ids, output),
        )
        if await self._complete(live, turn_id, answer, generation, engine_id):
            ended, thinks = self._renderer.ended(ids), prepared.thinks or answer.thinks
            grown = Grown(prepared.new_keys, answer.message, prepared.lane, prepared.kind, ended, thinks)
            live.tree.add(turn_id, prepared.join, prepared.stream, ids, grown)
            LOG.debug("turn", id=turn_id, tokens=len(ids), seconds=round(time.monotonic() - started, 3))
            return answer
        async with self._database.begin() as conn:
            known = await turns.get_call(conn, turn_id)
        if known is None or known.state is not TurnState.COMPLETED or known.answer is None:
            raise UnauthorisedError  # sealed meanwhile
        return await self._stored(known, None)

    async def _generate(self, live: Live, prepared: Prepared, turn_id: int) -> tuple[Generation, int]:
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
            ask = asyncio.create_task(self._router.client(engine).generate(wire, sampling, request_id(turn_id), engine.version))
            gone = asyncio.create_task(self._router.wait_until_gone(engine.id))
            try:
                await asyncio.wait({ask, gone}, return_when=asyncio.FIRST_COMPLETED)
                if ask.done() and (generation := ask.result()).finish_reason != "abort":
                    return generation, engine.id
            except EngineUnavailableError as error:
                LOG.info("engine lost, asking another", turn=turn_id, reason=str(error)[:200])
            finally:
                ask.cancel()
                gone.cancel()
                self.leases.runs_on(turn_id, None)
            self._router.avoid(engine.id)
            async with self._database.begin() as conn:
                known = await turns.get_call(conn, turn_id)
            if known is None or known.state is TurnState.ABORTED:
                raise UnauthorisedError

    async def _complete(self, live: Live, turn_id: int, answer: Answer, generation: Generation, engine_id: int) -> bool:
        done = CompletedTurn(
            id=turn_id,
            session_id=live.session.id,
            sampled_ids=ids_to_bytes(generation.token_ids),
            logprobs=logprobs_to_bytes(generation.logprobs),
            num_sampled=len(generation.token_ids),
            logprobs_valid=generation.logprobs_valid,
            version_spans=generation.version_spans,
            finish_reason=generation.finish_reason,
            answer=pack_json(answer_to_json(answer)),
            engine_id=engine_id,
            engine_wait_seconds=self.leases.waited(turn_id),
        )
        while True:
            try:
                return await self._writer.complete(done)
            except StoreUnavailableError as error:  # the sample is paid for: keep it until the store is back
                LOG.warning("turn not stored yet", turn=turn_id, reason=str(error))
                await asyncio.sleep(_POLL_SECONDS)


def _lane(lane: str) -> str:
    """As it is stored: a client may send anything, and an index holds no long texts."""
    return lane if len(lane) <= _LANE_CHARS else blake2b(lane.encode(), digest_size=16).hexdigest()


def _request(prepared: Prepared) -> dict[str, object]:
    """What the row keeps of a request: what is new in it, and what another process needs to go on from it."""
    head, new = prepared.reading.head, [message for unit in prepared.new_units for message in unit.messages]
    request: dict[str, object] = {
        "after": prepared.after,
        "messages": [message_to_json(message) for message in new],
        "keys": [key.hex() for key in prepared.new_keys],
        "thinks": prepared.thinks,
        "max_tokens": prepared.max_tokens,
    }
    return request if prepared.after is not None else request | {"system": head.system, "tools": head.tools}
