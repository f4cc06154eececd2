"""Generate one turn: from its `in_flight` row to `completed` or `aborted`.

Engines are restarted and replaced while agents run, so the same or another engine is asked until one answers; the agent
only waits longer. The row is completed before the answer is returned, so a client never gets bytes
that a crash could lose.
"""

import asyncio
import time
from dataclasses import dataclass, replace

import structlog

from adapter.auth import UnauthorisedError
from adapter.conversation import Answer
from adapter.output_parser import OutputParser
from adapter.prompt.prompt_builder import PreparedCall
from adapter.prompt.renderer import Renderer
from adapter.prompt.session_cache import LiveSession
from adapter.turns.leases import Leases
from adapter.turns.records import completed_turn, stored_answer
from adapter.turns.routing import EngineRouter
from adapter.turns.tree import TurnGrowth
from adapter.turns.writer import TurnWriter
from engine.client import Generation, Sampling
from ratchet.errors import EngineUnavailableError, StoreUnavailableError
from ratchet.store import turns
from ratchet.store.database import Database
from ratchet.store.engines import EngineRow
from ratchet.store.sessions import request_id
from ratchet.types import TurnState

_LOG = structlog.get_logger("ratchet.adapter")
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _SampledOutput:
    generation: Generation
    engine_id: int


class TurnGenerator:
    def __init__(
        self,
        database: Database,
        renderer: Renderer,
        outputs: OutputParser,
        router: EngineRouter,
        writer: TurnWriter,
        leases: Leases,
    ) -> None:
        self._database = database
        self._renderer = renderer
        self._outputs = outputs
        self._router = router
        self._writer = writer
        self._leases = leases

    async def generate(self, session: LiveSession, prepared: PreparedCall, turn_id: int) -> Answer:
        """Return the answer after its row is committed, or mark the row `aborted` and raise.

        Raises UnauthorisedError if the session was sealed or the row aborted meanwhile. Raises
        StoreUnavailableError if the store failed before the engine answered or when the row was to be aborted (it stays
        `in_flight`; when its lease has expired, a retry takes it over), or when a completed row was to be read.
        """
        try:
            return await self._generate(session, prepared, turn_id)
        except (UnauthorisedError, StoreUnavailableError):
            raise
        except Exception:
            async with self._database.begin() as conn:
                await turns.abort_turn(conn, turn_id)
            raise

    async def _generate(self, session: LiveSession, prepared: PreparedCall, turn_id: int) -> Answer:
        started = time.monotonic()
        sampled = await self._sample(session, prepared, turn_id)
        sampled = replace(sampled, generation=await self._cut(prepared, sampled.generation))
        if not sampled.generation.logprobs_valid:
            _LOG.error(
                "logprobs are incomplete or clamped: the turn is stored but will not be trained",
                turn=turn_id,
                engine=sampled.engine_id,
            )
        ids = sampled.generation.token_ids
        answer = await self._parse(prepared, turn_id, sampled.generation)
        if await self._complete(session, answer, sampled):
            thinks = prepared.thinks or answer.thinks
            growth = TurnGrowth(
                prepared.new_keys, answer.message, prepared.lane, prepared.kind, self._renderer.ended(ids), thinks
            )
            session.tree.add(turn_id, prepared.attach_point, prepared.stream, ids, growth)
            _LOG.debug("turn", id=turn_id, tokens=len(ids), seconds=round(time.monotonic() - started, 3))
            return answer
        # Another process completed or aborted the call, the session was sealed, or this process committed and the
        # confirmation was lost.
        async with self._database.begin() as conn:
            known = await turns.get_call(conn, turn_id)
        if known is None or known.state is not TurnState.COMPLETED or known.answer is None:
            raise UnauthorisedError
        return stored_answer(known)

    async def _cut(self, prepared: PreparedCall, generation: Generation) -> Generation:
        """Drop what was sampled behind a stop sequence: an engine that decodes several tokens at once may go on."""
        stop_sequences = prepared.request.options.stop_sequences
        if not stop_sequences:
            return generation
        return generation.cut(await self._outputs.num_ids_until_stop(generation.token_ids, stop_sequences))

    async def _parse(self, prepared: PreparedCall, turn_id: int, generation: Generation) -> Answer:
        ids = generation.token_ids
        stopped = self._renderer.stopped(ids)
        text = self._outputs.decode(ids[:-1] if stopped else ids)
        output = await self._outputs.parse(text, prepared.request, stopped)
        num_reasoning = await self._outputs.count_reasoning_tokens(ids, output)
        return Answer(
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
            output.violation,
            self._outputs.token_logprobs(ids, generation.logprobs) if prepared.request.options.logprobs else (),
        )

    # ------------------------------------------------------------ the engine

    async def _sample(self, session: LiveSession, prepared: PreparedCall, turn_id: int) -> _SampledOutput:
        """Ask engines until one answers.

        Raises UnauthorisedError if a call fails and its row has been aborted. While no engine is ready the row is
        not read, so the call of a sealed session may still be sampled; its completion then fails.
        """
        sampling = Sampling(
            prepared.max_tokens,
            session.row.temperature,
            self._renderer.stop_ids,
            stop=prepared.request.options.stop_sequences,
        )
        recorded_engine_id = prepared.engine_id
        while True:
            engine = await self._router.pick(session.row.id)
            if engine.id != recorded_engine_id:
                # The `diff` stage, which seals the session, aborts the call on the engine that the row names.
                recorded_engine_id = engine.id
                async with self._database.begin() as conn:
                    await turns.set_engine(conn, turn_id, engine.id)
            generation = await self._ask(engine, session, prepared, sampling, turn_id)
            if generation is not None:
                return _SampledOutput(generation, engine.id)
            async with self._database.begin() as conn:
                known = await turns.get_call(conn, turn_id)
            if known is None or known.state is TurnState.ABORTED:
                raise UnauthorisedError  # a seal or another process has aborted the call
            self._router.avoid(engine.id)

    async def _ask(
        self, engine: EngineRow, session: LiveSession, prepared: PreparedCall, sampling: Sampling, turn_id: int
    ) -> Generation | None:
        """Return the engine's output; None if the engine failed, went away or aborted the call."""
        self._leases.set_engine(turn_id, engine.id)
        prompt = session.ids_json.prompt_json(prepared.stream, prepared.lane)
        generating = asyncio.create_task(
            self._router.client(engine).generate(prompt, sampling, request_id(turn_id), engine.version)
        )
        gone = asyncio.create_task(self._router.wait_until_gone(engine.id))
        try:
            await asyncio.wait({generating, gone}, return_when=asyncio.FIRST_COMPLETED)
            if generating.done() and (generation := generating.result()).finish_reason != "abort":
                return generation
        except EngineUnavailableError as error:
            _LOG.info("engine lost, asking another", turn=turn_id, reason=str(error)[:200])
        finally:
            generating.cancel()
            gone.cancel()
            self._leases.set_engine(turn_id, None)
        return None

    # ------------------------------------------------------------ the store

    async def _complete(self, session: LiveSession, answer: Answer, sampled: _SampledOutput) -> bool:
        """Complete the row, see `TurnWriter.complete`.

        Repeated while the store is unavailable: the sample has been computed and is kept.
        """
        waited_seconds = self._leases.finish_generation(answer.turn_id)
        completed = completed_turn(session.row, answer, sampled.generation, sampled.engine_id, waited_seconds)
        while True:
            try:
                return await self._writer.complete(completed)
            except StoreUnavailableError as error:
                _LOG.warning("turn not stored yet", turn=completed.id, reason=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
