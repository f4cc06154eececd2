"""Answer a turn by an endpoint: the conversation goes out as Chat Completions, and a message comes back.

Their rows have no logprobs, and tokens only if `endpoint.tokens` is true and the chat template writes the answer. The
tokens have the run's version 0, whose address is the endpoint's. All else is as for the policy: the row is inserted
before the call and completed before the answer is sent, and a repeated request finds it.
"""

import asyncio
import random
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import orjson
import structlog

from adapter.auth import UnauthorisedError
from adapter.conversation import Answer, Message, RequestOptions
from adapter.dialects.base import InvalidRequestError
from adapter.endpoint import (
    EndpointAnswer,
    EndpointClient,
    EndpointContextError,
    EndpointRejectedError,
    EndpointUnavailableError,
)
from adapter.output_parser import OutputParser
from adapter.prompt.prompt_builder import PreparedCall, PromptTooLongError
from adapter.prompt.request_parser import ParsedRequest
from adapter.prompt.session_cache import LiveSession
from adapter.store_outage import StoreOutage
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.telemetry import endpoint_span
from engine.generation import Generation
from ratchet.config_sections import EndpointConfig
from ratchet.errors import ConfigError
from ratchet.types import JsonObject, TurnState, UnreadCause, policy_version
from store import session_notes, turns
from store.arrays import Ids
from store.database import Database

_LOG = structlog.get_logger("ratchet.adapter")
_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 60.0
_NO_LOGPROBS = "logprobs: the endpoint of this evaluation returns none; leave the field out"
_MAX_STOPS = 4
"""More stop sequences are refused by OpenAI; the adapter cuts at all of them in any case."""


class ForwardedAnswer(NamedTuple):
    """An endpoint's answer, and the tokens for it, none if they are not stored."""

    answer: Answer
    ids: Ids

    def generation(self, run_id: str) -> Generation:
        """Return the ids without logprobs: nothing of the run's model sampled them."""
        span = {"version": policy_version(run_id, 0, 0), "start": 0, "end": len(self.ids)}
        return Generation(self.ids, np.empty(0, np.float32), [span] if len(self.ids) else [], self.answer.finish)


class TurnForwarder:
    def __init__(self, database: Database, outputs: OutputParser, waits: EngineWaits, outage: StoreOutage) -> None:
        self._database = database
        self._outputs = outputs
        self._waits = waits
        self._outage = outage
        self._clients: dict[str, EndpointClient] = {}
        self._without_logprobs: set[str] = set()  # endpoints that returned none although they were asked for

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def answer(self, session: LiveSession, prepared: PreparedCall, turn_id: int) -> ForwardedAnswer:
        """Ask the session's endpoint until it answers, however long it is away.

        Raises UnauthorisedError if the row has been aborted meanwhile, PromptTooLongError if the context is full,
        EndpointRejectedError if the endpoint refuses what an answer of the policy has led to, or what is said in the
        request, and InvalidRequestError if it returns no logprobs and the client asked for them.
        """
        endpoint = session.row.endpoint
        assert endpoint is not None
        if prepared.request.options.logprobs and endpoint.model_dump_json() in self._without_logprobs:
            raise InvalidRequestError(_NO_LOGPROBS)
        client = self._client(endpoint)
        body = chat_request(prepared.request, session.row.temperature, prepared.max_tokens)

        async def note(reason: str | None) -> None:
            await self._database.run(session_notes.note_endpoint_error, session.row.id, reason)

        delay_seconds = _FIRST_DELAY_SECONDS
        has_failed = False
        while True:
            began = time.monotonic()
            self._waits.set_forwarded(turn_id, True)
            try:
                with endpoint_span(endpoint.url):
                    found = await client.complete(body)
                self._require_logprobs(prepared.request, endpoint, found)
                if has_failed:
                    await self._outage.hold(partial(note, None))
                return await self._tokenized(found, self._answer_of(found, prepared, turn_id), prepared)
            except EndpointContextError as error:
                limit = error.max_tokens or session.row.limits["max_context_tokens"]
                num_tokens = max(error.num_tokens or 0, limit + 1)
                raise PromptTooLongError(num_tokens, limit, prepared.request.options) from error
            except (EndpointUnavailableError, EndpointRejectedError, ConfigError) as error:
                # Before its first answer the policy has had no part in the request: its form is a person's to mend.
                has_answered = prepared.after_turn_id is not None
                if isinstance(error, EndpointRejectedError) and (error.for_content or has_answered):
                    raise
                self._waits.set_forwarded(turn_id, False)
                self._waits.credit(turn_id, time.monotonic() - began)
                has_failed = True
                hint = error.retry_after_seconds if isinstance(error, EndpointUnavailableError) else None
                pause_seconds = min(_MAX_DELAY_SECONDS, max(delay_seconds, hint or 0.0)) * random.uniform(1.0, 1.2)
                _LOG.warning("endpoint asked again", turn=turn_id, reason=str(error), seconds=round(pause_seconds, 1))
                await self._outage.hold(partial(note, str(error)))
            finally:
                self._waits.set_forwarded(turn_id, False)
            await asyncio.sleep(pause_seconds)
            delay_seconds = min(_MAX_DELAY_SECONDS, delay_seconds * 2)
            known = await self._outage.hold(lambda: self._database.read(turns.get_call, turn_id))
            if known is None or known.state is TurnState.ABORTED:
                raise UnauthorisedError

    def _client(self, endpoint: EndpointConfig) -> EndpointClient:
        key = endpoint.model_dump_json()
        if key not in self._clients:
            self._clients[key] = EndpointClient(endpoint)
        return self._clients[key]

    def _answer_of(self, found: EndpointAnswer, prepared: PreparedCall, turn_id: int) -> Answer:
        output = self._outputs.parse_endpoint(found, prepared.request)
        return Answer(
            turn_id,
            output.message,
            output.finish,
            found.prompt_tokens,
            found.completion_tokens,
            int(time.time()),
            found.cached_tokens,
            output.stop_sequence,
            reasoning_tokens=found.reasoning_tokens,
            violation=output.violation,
            unread=output.unread,
            logprobs=tuple(found.logprobs) if prepared.request.options.logprobs else (),
        )

    async def _tokenized(self, found: EndpointAnswer, answer: Answer, prepared: PreparedCall) -> ForwardedAnswer:
        """Write the answer as tokens behind the prompt's, if it has any."""
        written: Ids | UnreadCause | None = None
        if prepared.stream.length:
            is_cut = found.finish == "length" or answer.finish == "stop_sequence"
            written = (
                UnreadCause.ENDPOINT_CUT if is_cut else await self._outputs.write(answer.message, prepared.request)
            )
        if isinstance(written, np.ndarray):
            return ForwardedAnswer(answer, written)
        return ForwardedAnswer(replace(answer, unread=written or answer.unread), np.empty(0, np.int32))

    def _require_logprobs(self, request: ParsedRequest, endpoint: EndpointConfig, found: EndpointAnswer) -> None:
        """Raise InvalidRequestError if the client asked for logprobs and the endpoint returned none."""
        if request.options.logprobs and found.text and not found.logprobs:
            self._without_logprobs.add(endpoint.model_dump_json())
            raise InvalidRequestError(_NO_LOGPROBS)


def chat_request(request: ParsedRequest, temperature: float, max_tokens: int) -> JsonObject:
    """Return a Chat Completions body for the same answer, without the model's name; sampling is the run's."""
    options = request.options
    body: JsonObject = {
        "messages": [_wire_message(message) for message in request.preamble.messages(request.runs)],
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    if request.preamble.tools:
        body["tools"] = list(request.preamble.tools)
        body |= _tool_options(options)
    if options.stop_sequences:
        body["stop"] = list(options.stop_sequences[:_MAX_STOPS])
    if options.logprobs:
        body["logprobs"] = True
    if options.output_schema is not None:
        schema = {"name": "answer", "schema": dict(options.output_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _tool_options(options: RequestOptions) -> JsonObject:
    """The choice of tools in the form that all servers know. Calls of tools that are not chosen become text later."""
    found: JsonObject = {}
    choice = options.tool_choice
    if choice.allowed is not None and len(choice.allowed) == 1 and choice.required:
        found["tool_choice"] = {"type": "function", "function": {"name": next(iter(choice.allowed))}}
    elif choice.required or not choice.allows_calls:
        found["tool_choice"] = "required" if choice.required else "none"
    if not options.parallel_calls:
        found["parallel_tool_calls"] = False
    return found


def _wire_message(message: Message) -> JsonObject:
    """Return a message in OpenAI's form, in which arguments are JSON text."""
    wire = message.for_template()
    for call in wire.get("tool_calls", []):
        call["function"]["arguments"] = orjson.dumps(call["function"]["arguments"]).decode()
    return wire
