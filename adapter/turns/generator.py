"""Generate one turn: from its `in_flight` row to `completed` or `aborted`.

Engines are restarted and replaced while agents run, so the same or another engine is asked until one answers; the agent
only waits longer, as it does while the store is unavailable. The row is completed before the answer is returned, so a
client never gets a whole answer that a crash could lose.

A client that reads a stream sees the answer grow. If its engine is lost, a dead engine has not said which weights
sampled the tokens so far, so these cannot be trained. If nothing of them may have been shown, the next engine samples a
new answer. Else it continues from the tokens that are there, which get no version: each was still sampled after all
those before it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog

from adapter.auth import UnauthorisedError
from adapter.conversation import Answer
from adapter.live_answer import LiveAnswer
from adapter.output_parser import OutputParser, ParsedOutput
from adapter.prompt.prompt_builder import PreparedCall
from adapter.prompt.renderer import Renderer
from adapter.prompt.session_cache import LiveSession
from adapter.store_outage import StoreOutage
from adapter.turns.call_options import CallOptions
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.forwarder import TurnForwarder
from adapter.turns.records import completed_turn, stored_answer
from adapter.turns.routing import EngineRouter
from adapter.turns.telemetry import engine_span, note_answer, turn_span
from adapter.turns.tree import TurnGrowth
from adapter.turns.writer import TurnWriter
from engine.generate_request import IdsText, Sampling
from engine.generation import Generation, SampledTokens
from ratchet.errors import EngineUnavailableError
from ratchet.lora_slots import version_in_label
from ratchet.types import TurnState
from store import turns
from store.arrays import Ids
from store.database import Database
from store.engines import EngineRow
from store.sessions import SessionRow, request_id

_LOG = structlog.get_logger("ratchet.adapter")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _SampledOutput:
    generation: Generation
    engine_id: int


@dataclass(frozen=True, slots=True)
class _AnsweredCall:
    """An answer and its tokens, which an endpoint's answer may lack. `ended`: the ids end the answer."""

    answer: Answer
    generation: Generation
    engine_id: int | None
    ended: bool


@dataclass(frozen=True, slots=True)
class _EngineCall:
    """One turn's request to engines. `sampled`: the output so far. `streams`: the output is to grow in chunks."""

    session: SessionRow
    turn_id: int
    prompt: IdsText
    sampling: Sampling
    sampled: SampledTokens
    streams: bool

    def end(self) -> bool:
        """If the output that a lost engine left is complete, set its finish reason. Return whether it is complete.

        It is complete if it ends with a stop token or has as many tokens as the limit allows.
        """
        ids = self.sampled.token_ids
        if ids and ids[-1] in self.sampling.stop_token_ids:
            self.sampled.finish_reason = "stop"
        elif len(ids) >= self.sampling.max_tokens:
            self.sampled.finish_reason = "length"
        return self.sampled.finish_reason is not None

    def rest(self) -> "_EngineCall":
        """The call that continues the output so far."""
        ids = self.sampled.token_ids
        if not ids:
            return self
        prompt = IdsText((*self.prompt.pieces, b",", *IdsText.of(ids).pieces))
        return replace(
            self, prompt=prompt, sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(ids))
        )


@dataclass(eq=False, repr=False)
class TurnGenerator:
    _database: Database
    _renderer: Renderer
    _outputs: OutputParser
    _router: EngineRouter
    _writer: TurnWriter
    _waits: EngineWaits
    _outage: StoreOutage

    def __post_init__(self) -> None:
        self._forwarder = TurnForwarder(self._database, self._outputs, self._waits, self._outage)

    async def close(self) -> None:
        await self._forwarder.close()

    def live_answer(self, session: LiveSession, prepared: PreparedCall) -> LiveAnswer | None:
        """Return what streams show while the turn is sampled; None without a stream, or for an endpoint's answer."""
        if session.row.endpoint is not None:
            return None
        return self._outputs.live_answer(prepared.request) if prepared.request.options.stream else None

    async def generate(
        self, session: LiveSession, prepared: PreparedCall, turn_id: int, live: LiveAnswer | None
    ) -> Answer:
        """Return the answer after its row is committed, or mark the row `aborted` and raise.

        Waits while the store is unavailable. Raises UnauthorisedError if the session was sealed or the row aborted
        meanwhile. `live` is fed with the tokens as they come.
        """
        with turn_span(session.row, prepared, turn_id):
            try:
                answer = await self._generate(session, prepared, turn_id, live)
                note_answer(answer)
                return answer
            except UnauthorisedError:
                raise
            except Exception:
                await self._outage.hold(lambda: self._database.run(turns.abort_turn, turn_id))
                raise

    async def _generate(
        self, session: LiveSession, prepared: PreparedCall, turn_id: int, live: LiveAnswer | None
    ) -> Answer:
        started = time.monotonic()
        if session.row.endpoint is not None:
            forwarded = await self._forwarder.answer(session, prepared, turn_id)
            thinks = len(forwarded.ids) > 0 and self._renderer.thinks(forwarded.answer.message)
            generation, ended = forwarded.generation(session.row.run_id), self._renderer.ended(forwarded.ids)
            answered = _AnsweredCall(replace(forwarded.answer, thinks=thinks), generation, None, ended)
        else:
            answered = await self._answer_by_engine(session, prepared, turn_id, live)
        answer = replace(answered.answer, asked=CallOptions.of(prepared.request.options, prepared.max_tokens).to_json())
        completed = completed_turn(
            session.row, answer, answered.generation, answered.engine_id, self._waits.remove(turn_id)
        )
        if await self._stored(session, lambda: self._writer.complete(completed)):
            ids = answered.generation.token_ids
            thinks = prepared.thinks or answer.thinks
            growth = TurnGrowth(
                prepared.new_keys,
                answer.message,
                prepared.lane,
                prepared.kind,
                answered.ended,
                thinks,
                prepared.request.loose_keys[-1],
            )
            session.tree.add(turn_id, prepared.attach_point, prepared.stream, ids, growth)
            _LOG.debug("turn", id=turn_id, tokens=len(ids), seconds=round(time.monotonic() - started, 3))
            return answer
        # Another process completed or aborted the call, the session was sealed, or this process committed and the
        # confirmation was lost.
        known = await self._stored(session, lambda: self._database.read(turns.get_call, turn_id))
        if known is None or known.state is not TurnState.COMPLETED or known.answer is None:
            raise UnauthorisedError
        return stored_answer(known)

    async def _answer_by_engine(
        self, session: LiveSession, prepared: PreparedCall, turn_id: int, live: LiveAnswer | None
    ) -> _AnsweredCall:
        sampled = await self._sample(session, prepared, turn_id, live)
        generation = sampled.generation
        if stop_sequences := prepared.request.options.stop_sequences:
            # An engine that decodes several tokens at once may go on behind one.
            generation = generation.cut(await self._outputs.num_ids_until_stop(generation.token_ids, stop_sequences))
        if not generation.logprobs_valid:
            _LOG.error(
                "logprobs are incomplete or clamped: the turn is stored but will not be trained",
                turn=turn_id,
                engine=sampled.engine_id,
            )
        answer = await self._parse(prepared, turn_id, generation)
        self._outputs.check_live(live, answer.message)
        return _AnsweredCall(answer, generation, sampled.engine_id, self._renderer.ended(generation.token_ids))

    async def viewed(self, session: LiveSession, prepared: PreparedCall, answer: Answer) -> Answer:
        """The answer that the tokens of a completed turn make with this request's options.

        Its calls keep their ids as far as they are the same, so that they are recognised if they come back.
        """
        if answer.turn_id not in session.tree.nodes:
            return answer
        output = await self._output(prepared, session.tree.sampled(answer.turn_id))
        known = dict(enumerate(answer.message.tool_calls))
        calls = tuple(
            known[at] if at in known and replace(call, id=known[at].id) == known[at] else call
            for at, call in enumerate(output.message.tool_calls)
        )
        message = replace(output.message, tool_calls=calls)
        session.tree.add_view(answer.turn_id, prepared.request.keys[-1], message)
        return replace(
            answer,
            message=message,
            finish=output.finish,
            stop_sequence=output.stop_sequence,
            violation=output.violation,
            thinks=self._renderer.thinks(message),
        )

    async def _output(self, prepared: PreparedCall, ids: Ids) -> ParsedOutput:
        """The message that sampled ids make with the request's options."""
        stopped = self._renderer.stopped(ids)
        return await self._outputs.parse(self._outputs.decode(ids[:-1] if stopped else ids), prepared.request, stopped)

    async def _parse(self, prepared: PreparedCall, turn_id: int, generation: Generation) -> Answer:
        ids = generation.token_ids
        output = await self._output(prepared, ids)
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
            unread=output.unread,
        )

    async def _sample(
        self, session: LiveSession, prepared: PreparedCall, turn_id: int, live: LiveAnswer | None
    ) -> _SampledOutput:
        """Ask engines until the output is complete.

        Raises UnauthorisedError if a call fails and its row has been aborted. While no engine is ready the row is
        not read, so the call of a sealed session may still be sampled; its completion then fails.
        """
        stop_sequences = prepared.request.options.stop_sequences
        sampling = Sampling(
            prepared.max_tokens,
            session.row.temperature,
            self._renderer.stop_ids,
            stop=stop_sequences,
            experts_from=max(0, prepared.attach_point.kept_tokens - 1),  # the earlier ones are in the parent's row
        )
        prompt = session.ids_json.prompt_json(prepared.stream, prepared.lane)
        sampled = SampledTokens(None if live is None else live.feed, session.row.version_in)
        call = _EngineCall(session.row, turn_id, prompt, sampling, sampled, live is not None)
        recorded_engine_id = prepared.engine_id
        while True:
            engine = await self._router.pick(session.row)
            if engine.id != recorded_engine_id:
                # The `diff` stage, which seals the session, aborts the call on the engine that the row names.
                recorded_engine_id = engine.id
                await self._stored(session, partial(self._database.run, turns.set_engine, turn_id, engine.id))
            if await self._ask(engine, call):
                return _SampledOutput(sampled.generation(), engine.id)
            known = await self._stored(session, lambda: self._database.read(turns.get_call, turn_id))
            if known is None or known.state is TurnState.ABORTED:
                raise UnauthorisedError  # a seal or another process has aborted the call
            if sampled.finish_reason is None and (live is None or live.begin_again()):
                sampled.begin_again()
            else:
                sampled.continue_elsewhere()
            if call.end():
                return _SampledOutput(sampled.generation(), engine.id)
            self._router.avoid(engine.id)

    async def _ask(self, engine: EngineRow, call: _EngineCall) -> bool:
        """Return whether the output is complete; False if the engine failed, went away or aborted the call."""
        self._waits.set_engine(call.turn_id, engine.id)
        asking = asyncio.create_task(self._add_tokens(engine, call))
        gone = asyncio.create_task(self._router.wait_until_gone(engine.id))
        try:
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
                return call.sampled.finish_reason not in (None, "abort")
        except EngineUnavailableError as error:
            _LOG.info("engine lost, asking another", turn=call.turn_id, reason=str(error)[:200])
        finally:
            asking.cancel()
            gone.cancel()
            self._waits.set_engine(call.turn_id, None)
        return False

    async def _add_tokens(self, engine: EngineRow, call: _EngineCall) -> None:
        client = self._router.client(engine)
        rest = call.rest()
        name = request_id(call.turn_id)
        version, slot = call.session.version_in(engine.version), call.session.lora_slot
        # The slot may still have another run's version: its blocks are then of no use to any other call.
        salt = name if version is None and version_in_label(engine.version, slot) else version
        with engine_span(engine, version, name):
            ask = client.stream if call.streams else client.generate
            await ask(rest.prompt, rest.sampling, name, salt, call.sampled, slot)

    async def _stored(self, session: LiveSession, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `work` returns, held while the store is away; if it takes long, the session waits."""
        with self._waits.storing(session.row.id):
            return await self._outage.hold(work)
