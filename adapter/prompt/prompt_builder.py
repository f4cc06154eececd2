"""Build a call's prompt: exact ids, their place in the session's turn tree, the token limit of the answer.

This is everything that happens before the turn's row is written.

    body ─▶ parse what is new ─▶ does the prompt begin with a stored stream?
                                 ├─ yes ─▶ that stream + the ids of the new text ──────────┐
                                 └─ no ──▶ parse the whole body, compose the prompt from   ├─▶ attach to the tree
                                           template text and sampled answers ──────────────┘

A history that cannot be rendered in segments is parsed whole and rendered in full; what follows the stored stream of
its last recognised answer is taken from that (`stream_tail.py`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import structlog

from adapter.conversation import MessageRun, RequestOptions
from adapter.dialects.base import Dialect
from adapter.dialects.media import MediaPolicy
from adapter.prompt.chat_template import TemplateRefusedError
from adapter.prompt.history_validation import refuse_media, validate_history
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import ParsedRequest
from adapter.prompt.session_cache import LiveSession, SessionCache
from adapter.prompt.stream_tail import EarlierTextChangedError
from adapter.prompt.template_segments import NotSegmentableError, TemplateSegments
from adapter.prompt.token_buffer import TokenStream
from adapter.turns.forks import cause_of, kind_of
from adapter.turns.routing import EngineRouter
from adapter.turns.tree import AttachPoint
from ratchet.types import ForkCause, JsonObject, TurnKind
from store.arrays import Ids

_LOG = structlog.get_logger("ratchet.adapter")
_NO_IDS = np.empty(0, np.int32)
_THREAD_FROM_CHARS = 8_000
"""Shorter texts behind a stored stream are tokenised on the event loop, in a few milliseconds: a thread costs more."""
_THREAD_FROM_BYTES = 32_000
"""Shorter bodies are parsed on the event loop, in less than a millisecond."""


class PromptTooLongError(Exception):
    """Less than `min_response_tokens` would be left for the answer. No row is written."""

    def __init__(self, prompt_tokens: int, max_tokens: int, options: RequestOptions) -> None:
        super().__init__(f"prompt is too long: {prompt_tokens} tokens > {max_tokens} maximum")
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.options = options


class TurnLimitError(Exception):
    """The session has had all the turns that its limits allow."""

    def __init__(self, max_turns: int) -> None:
        super().__init__(f"turn limit: this session's limit of {max_turns} model calls is reached")


class UnknownModelError(Exception):
    """The request names a model that is not served to this session."""


@dataclass(frozen=True, slots=True)
class _StoredPrefix:
    """The last stored turn whose request and answer the history begins with; the answer is runs[run_index].

    `reusable`: the prompt begins with that turn's stream, so that only the text after it has to be rendered.
    """

    turn_id: int
    run_index: int
    reusable: bool


@dataclass(frozen=True, slots=True)
class _TokenizedRequest:
    """A request and its prompt's ids, before its place in the tree is known.

    `new_ids` follow the stream of turn `base`, or are the whole prompt. `thinks`, `dropped`: as in `ComposedPrompt`.
    """

    request: ParsedRequest
    stored: _StoredPrefix | None
    base: int | None
    new_ids: Ids
    num_tokens: int
    thinks: bool
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call with its exact prompt, its place in the tree and the engine that will most likely serve it.

    `new_runs` follow the answer of turn `after_turn_id`, or are the whole history if it is None. `new_keys`: of the
    histories in the request that the tree does not know yet, and of the request itself. `max_tokens`: of the answer.
    """

    request: ParsedRequest
    kind: TurnKind
    stream: TokenStream
    attach_point: AttachPoint
    fork_cause: ForkCause | None
    thinks: bool
    after_turn_id: int | None
    new_runs: Sequence[MessageRun]
    new_keys: Sequence[bytes]
    max_tokens: int
    engine_id: int | None

    @property
    def ids(self) -> Ids:
        return self.stream.ids

    @property
    def lane(self) -> str:
        return self.request.options.lane

    @property
    def new_messages(self) -> list[JsonObject]:
        """The messages of `new_runs` in the form of templates, as they are stored."""
        return [message.for_template() for run in self.new_runs for message in run.messages]

    @property
    def suffix(self) -> Ids:
        """The ids that the parent's stream does not have."""
        return self.ids[self.attach_point.kept_tokens :]

    @property
    def digest(self) -> bytes:
        """Equal for requests with the same history and kind; a repeated request is recognised by it."""
        return blake2b(self.request.keys[-1] + self.kind.encode(), digest_size=16).digest()


class PromptBuilder:
    def __init__(
        self, renderer: Renderer, router: EngineRouter, sessions: SessionCache, images: MediaPolicy = "placeholder"
    ) -> None:
        self._renderer = renderer
        self._router = router
        self._sessions = sessions
        self._refuses_media = images == "refuse"
        if renderer.full_render_reason is not None:
            _LOG.warning(
                "every prompt is rendered and tokenised in full: the chat template cannot be rendered in segments",
                why=renderer.full_render_reason,
            )

    async def prepare(
        self, session: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str]
    ) -> PreparedCall:
        """Build the prompt of a request and find its place in the tree.

        Raises InvalidRequestError, UnknownModelError, TemplateRefusedError, PromptTooLongError, StoreUnavailableError.
        """
        if session.row.endpoint is not None:
            return await self._prepare_forward(session, body, dialect, headers)
        tokenized = await self._tokenize_request(session, body, dialect, headers)
        options = tokenized.request.options
        limits = session.row.limits
        left = limits["max_context_tokens"] - tokenized.num_tokens
        least = limits.get("min_response_tokens", 1)
        if left < least:
            raise PromptTooLongError(tokenized.num_tokens, limits["max_context_tokens"] - least, options)
        return self._place(session, tokenized, min(left, limits["max_response_tokens"], options.max_tokens or left))

    async def count(self, session: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> int:
        """Return the number of tokens of the prompt that this call would send, sampled ids included.

        For an endpoint it is an estimate, made with the served model's own template and tokenizer.
        """
        if session.row.endpoint is not None:
            request = await self._parse_forward(session, body, dialect, headers)
            return len(await asyncio.to_thread(self._renderer.full, request.preamble, request.runs))
        return (await self._tokenize_request(session, body, dialect, headers)).num_tokens

    async def _prepare_forward(
        self, session: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str]
    ) -> PreparedCall:
        """Prepare a call that an endpoint answers: a whole history, and its tokens if answers are stored as tokens."""
        most = session.row.limits["max_response_tokens"]
        if session.row.endpoint is not None and session.row.endpoint.tokens:
            with suppress(TemplateRefusedError, PromptTooLongError):  # the endpoint may take what the template does not
                tokenized = await self._tokenize_request(session, body, dialect, headers)
                return self._place(session, tokenized, min(most, tokenized.request.options.max_tokens or most))
        request = await self._parse_forward(session, body, dialect, headers)
        options = request.options
        stored = self._find_stored_prefix(session, request)
        tokenized = _TokenizedRequest(request, stored, None, _NO_IDS, 0, thinks=False)
        return self._place(session, tokenized, min(most, options.max_tokens or most))

    async def _parse_forward(
        self, session: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str]
    ) -> ParsedRequest:
        """Parse the whole request and check it."""
        request = await self._parse(session, body, dialect, headers, whole=True)
        if not session.loaded or _is_answered_elsewhere(session, request):
            await self._sessions.load(session)
        self._check(session, request)
        return request

    def _check(self, session: LiveSession, request: ParsedRequest) -> None:
        """Raise UnknownModelError or InvalidRequestError for a request that cannot be served."""
        model = request.options.model
        if model not in ("", session.row.model):
            raise UnknownModelError(f"model {model!r} is not served here; use {session.row.model!r}")
        validate_history(request.runs, request.num_skipped)
        if self._refuses_media:
            refuse_media(request.runs)

    def _place(self, session: LiveSession, tokenized: _TokenizedRequest, max_tokens: int) -> PreparedCall:
        """Find the prompt's place in the tree. Does not await, so that the place is still right when it returns."""
        request = tokenized.request
        options = request.options
        tree = session.tree
        if tokenized.base is None:
            attach_point = tree.attach(tokenized.new_ids, None)
            stream = tree.prompt(attach_point, tokenized.new_ids[attach_point.kept_tokens :])
        else:
            stream = tree.nodes[tokenized.base].stream.extended(tokenized.new_ids)
            attach_point = tree.attach(stream.ids, tokenized.base)
        kind = kind_of(options, request.preamble.system, request.runs)
        cause = engine = None
        if session.row.endpoint is None:
            cause = cause_of(
                tree, attach_point, stream.length, options.lane, request.runs, request.keys, tokenized.dropped, kind
            )
            engine = self._router.likely(session.row)
        return PreparedCall(
            request=request,
            kind=kind,
            stream=stream,
            attach_point=attach_point,
            fork_cause=cause,
            thinks=tokenized.thinks,
            after_turn_id=None if tokenized.stored is None else tokenized.stored.turn_id,
            new_runs=_runs_after(request, tokenized.stored),
            new_keys=[*(key for key in request.keys[:-1] if key not in tree.known_keys), request.keys[-1]],
            max_tokens=max_tokens,
            engine_id=engine.id if engine else None,
        )

    async def _tokenize_request(
        self, session: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str]
    ) -> _TokenizedRequest:
        """Parse the request, check it, and tokenise what is new.

        Parsed whole if no stored stream can be reused, if the new part or the template itself cannot be rendered in
        segments, or if turns were loaded whose reasoning is put back.
        """
        is_forwarded = session.row.endpoint is not None
        whole = is_forwarded or self._renderer.segments is None
        request = await self._parse(session, body, dialect, headers, whole)
        is_incomplete = not session.loaded or _is_answered_elsewhere(session, request)
        if is_incomplete and await self._sessions.load(session):
            # With the new turns' reasoning, and their calls put together.
            request = await self._parse(session, body, dialect, headers, whole=True)
        stored = self._find_stored_prefix(session, request)
        if request.num_skipped and (stored is None or not stored.reusable):
            request = await self._parse(session, body, dialect, headers, whole=True)
            stored = self._find_stored_prefix(session, request)
        limits = session.row.limits
        if len(request.runs) > limits["max_context_tokens"]:  # each run has a token at least: nothing is rendered
            raise PromptTooLongError(len(request.runs), limits["max_context_tokens"], request.options)
        self._check(session, request)
        num_chars = sum(len(message.text) for run in _runs_after(request, stored) for message in run.messages)
        try:
            if stored is not None and stored.reusable and num_chars < _THREAD_FROM_CHARS:
                return self._tokenize(session, request, stored)
            return await asyncio.to_thread(self._tokenize, session, request, stored)
        except NotSegmentableError:
            if request.num_skipped:
                request = await self._parse(session, body, dialect, headers, whole=True)
                stored = self._find_stored_prefix(session, request)
            return await asyncio.to_thread(self._tokenize_in_full, session, request, stored)

    async def _parse(
        self, session: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str], whole: bool
    ) -> ParsedRequest:
        """Parse a request, in a thread if more than a little of it has to be parsed."""
        parser = session.parser
        if len(body) < _THREAD_FROM_BYTES:
            return parser.parse(body, dialect, headers, whole)
        if not whole and parser.num_new_bytes(body) < _THREAD_FROM_BYTES:
            request = parser.parse_new(body, dialect, headers)
            if request is not None:
                return request
            whole = True
        return await asyncio.to_thread(parser.parse, body, dialect, headers, whole)

    def _find_stored_prefix(self, session: LiveSession, request: ParsedRequest) -> _StoredPrefix | None:
        lane = request.options.lane
        segments = self._renderer.segments
        newest = session.tree.newest_answer(request.runs, request.keys, request.loose_keys, lane)
        if newest is None:
            return None
        new_runs = request.runs[newest.run_index + 1 :]
        # A sampled answer among the new runs stands with its own ids, and a new question may drop the stream's
        # thinking.
        sampled = any(run.assistant and session.tree.turn_of_equal_answer(run, lane) is not None for run in new_runs)
        node = session.tree.nodes[newest.turn_id]
        drops = node.thinks and segments is not None and _may_drop_thinking(segments, new_runs)
        reusable = segments is not None and node.has_answer and not sampled and not drops
        return _StoredPrefix(newest.turn_id, newest.run_index, reusable)

    def _tokenize(
        self, session: LiveSession, request: ParsedRequest, stored: _StoredPrefix | None
    ) -> _TokenizedRequest:
        """Tokenise what the stored stream lacks, or all runs. Raises NotSegmentableError, TemplateRefusedError."""
        if stored is not None and stored.reusable:
            node = session.tree.nodes[stored.turn_id]
            continued = self._renderer.continued(_runs_after(request, stored), node.ended)
            thinks = continued.thinks or (node.thinks and not continued.drops)
            num_tokens = node.length + len(continued.ids)
            return _TokenizedRequest(request, stored, stored.turn_id, continued.ids, num_tokens, thinks)
        sampled = self._sampled_ids(session, request)
        composed = self._renderer.composed(request.preamble, request.runs, sampled)
        return _TokenizedRequest(
            request, stored, None, composed.ids, len(composed.ids), composed.thinks, composed.dropped
        )

    def _tokenize_in_full(
        self, session: LiveSession, request: ParsedRequest, stored: _StoredPrefix | None
    ) -> _TokenizedRequest:
        """Tokenise what follows the stored stream, or everything. Raises TemplateRefusedError."""
        dropped = False
        if stored is not None and (node := session.tree.nodes[stored.turn_id]).has_answer:
            try:
                ids = self._renderer.resumed(request.preamble, request.runs, stored.run_index, node.stream.ids)
                if ids is not None:
                    num_tokens = node.length + len(ids)
                    return _TokenizedRequest(request, stored, stored.turn_id, ids, num_tokens, node.thinks)
            except EarlierTextChangedError as error:
                dropped = error.drops_thinking
        ids = self._renderer.full(request.preamble, request.runs)
        return _TokenizedRequest(request, stored, None, ids, len(ids), thinks=False, dropped=dropped)

    def _sampled_ids(self, session: LiveSession, request: ParsedRequest) -> dict[int, Ids]:
        """Sampled ids by index of the run, for answers that are recognised as sampled.

        An answer is looked up by the history before it, or else by itself alone.
        """
        tree = session.tree
        lane = request.options.lane
        sampled = {}
        for at, run in enumerate(request.runs):
            if not run.assistant:
                continue
            turn_id = tree.turn_of_answer(request.keys[at], run, lane, request.loose_keys[at])
            turn_id = tree.turn_of_equal_answer(run, lane) if turn_id is None else turn_id
            if turn_id is not None and tree.nodes[turn_id].has_answer:
                sampled[at] = tree.sampled(turn_id)
        return sampled


def _is_answered_elsewhere(session: LiveSession, request: ParsedRequest) -> bool:
    """Return whether the last answer of the parsed runs is unknown here: another process gave it, or it was edited."""
    for at in range(len(request.runs) - 1, -1, -1):
        if request.runs[at].assistant:
            return request.keys[at + 1] not in session.tree.known_keys
    return False


def _may_drop_thinking(segments: TemplateSegments, runs: Sequence[MessageRun]) -> bool:
    """Return whether these runs make the template drop earlier thinking, or cannot be rendered in segments."""
    try:
        return any(not run.assistant and segments.between_answers(run).drops_thinking for run in runs)
    except NotSegmentableError:
        return True


def _runs_after(request: ParsedRequest, stored: _StoredPrefix | None) -> list[MessageRun]:
    """The runs that follow the stored answer, or all of them."""
    return request.runs if stored is None else request.runs[stored.run_index + 1 :]
