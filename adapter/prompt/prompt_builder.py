"""What a call's prompt is: exact ids, their place in the session's turn tree, token limits.

Why here: everything before the row is written; nothing of it changes the store.
Called by: `capture.py`.

    bytes ─▶ reading: what is new ─▶ which stored turn goes on? ─yes─▶ its stream + the new text's ids ─┐
                                              └─ no ─▶ composed: each answer by itself ─────────────────┴▶ where it joins the tree
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import structlog

from adapter.conversation import MessageRun, RequestOptions, answer_from_json
from adapter.dialects.base import Dialect
from adapter.prompt.history_validation import validate_history
from adapter.prompt.ids_json import IdsJson
from adapter.prompt.preamble_cache import PreambleCache
from adapter.prompt.renderer import Renderer
from adapter.prompt.request_parser import ParsedRequest, RequestParser
from adapter.prompt.template_segments import NotSegmentableError
from adapter.prompt.token_buffer import TokenStream
from adapter.settings import AdapterSettings
from adapter.turns.forks import cause_of, kind_of
from adapter.turns.routing import EngineRouter
from adapter.turns.tree import AttachPoint, TurnGrowth, TurnTree
from ratchet.store import sessions, turns
from ratchet.store.arrays import Ids, ids_from_bytes, unpack_json
from ratchet.store.database import Database
from ratchet.store.sessions import SessionRow
from ratchet.types import ForkCause, TurnKind

_LOG = structlog.get_logger("ratchet.adapter")
_THREAD_FROM_CHARS = 8_000  # less text is rendered and tokenised in a few milliseconds, without the detour
_THREAD_FROM_BYTES = 32_000  # less JSON is parsed in a millisecond
_LOADED_AT_ONCE = 20


class PromptTooLongError(Exception):
    """Less than `min_response_tokens` would be left for the answer. No row is written."""

    def __init__(self, prompt_tokens: int, max_tokens: int, wishes: RequestOptions) -> None:
        super().__init__(f"prompt is too long: {prompt_tokens} tokens > {max_tokens} maximum")
        self.prompt_tokens, self.max_tokens, self.wishes = prompt_tokens, max_tokens, wishes


class TurnLimitError(Exception):
    """The session has had all the turns that its limits allow. `activities/harnesses/cli_exits.py` knows it by its first words."""

    def __init__(self, max_turns: int) -> None:
        super().__init__(f"turn limit: this session's limit of {max_turns} model calls is reached")


class UnknownModelError(Exception):
    """The request names a model that this session is not served."""


@dataclass(slots=True)
class LiveSession:
    """What this process keeps of a session. Nothing of it matters: all is read again from the store after a restart."""

    session: SessionRow
    reader: RequestParser
    tree: TurnTree = field(default_factory=TurnTree)
    wire: IdsJson = field(default_factory=IdsJson)
    loaded: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_calls: int = 0

    @property
    def spent(self) -> bool:
        """Whether the session has had all the turns that its limits allow."""
        limit = self.session.limits.get("max_turns")
        return limit is not None and self.tree.num_turns >= limit


@dataclass(frozen=True, slots=True)
class _Found:
    """The last stored turn that a request goes on from; its answer is units[at]. `stands`: the prompt is its stream and new text."""

    turn_id: int
    at: int
    stands: bool


@dataclass(frozen=True, slots=True)
class _Made:
    """A prompt's ids: `new` behind the stream of turn `base`, or all of them. `thinks`, `dropped`: see `rendering.Composed`."""

    new: Ids
    base: int | None
    num_tokens: int
    thinks: bool
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was read and tokenised; nothing in the session has changed by it."""

    reading: ParsedRequest
    found: _Found | None
    made: _Made


@dataclass(slots=True)
class PreparedCall:
    """A call with its exact prompt, its place in the tree and the engine that will most likely serve it.

    `after`: the turn whose answer `new_units` follow, None where they are the whole history.
    """

    reading: ParsedRequest
    kind: TurnKind
    stream: TokenStream
    join: AttachPoint
    fork_cause: ForkCause | None
    thinks: bool
    after: int | None
    new_units: Sequence[MessageRun]
    new_keys: list[bytes]
    max_tokens: int
    engine_id: int | None = None

    @property
    def ids(self) -> Ids:
        return self.stream.ids

    @property
    def lane(self) -> str:
        return self.reading.wishes.lane

    @property
    def suffix(self) -> Ids:
        return self.ids[self.join.kept_tokens :]

    @property
    def digest(self) -> bytes:
        return blake2b(self.reading.keys[-1] + self.kind.encode(), digest_size=16).digest()


class PromptBuilder:
    def __init__(self, settings: AdapterSettings, database: Database, renderer: Renderer, router: EngineRouter) -> None:
        self._settings, self._database, self._renderer, self._router = settings, database, renderer, router
        self._heads = PreambleCache()
        self._live: OrderedDict[int, LiveSession] = OrderedDict()
        if renderer.full_because is not None:
            _LOG.warning(
                "every prompt is rendered and tokenised in full: the chat template is not made of parts",
                why=renderer.full_because,
            )

    def live(self, session: SessionRow) -> LiveSession:
        live = self._live.setdefault(session.id, LiveSession(session, RequestParser(self._heads)))
        self._live.move_to_end(session.id)
        while len(self._live) > self._settings.max_sessions:
            idle = next((key for key, one in self._live.items() if not one.num_calls and key != session.id), None)
            if idle is None:
                break
            del self._live[idle]
        return live

    # ------------------------------------------------------------ one request

    async def prepare(
        self, live: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str]
    ) -> PreparedCall:
        """Raises InvalidRequestError, UnknownModelError, TemplateRefusedError, PromptTooLongError."""
        asked = await self._asked(live, body, dialect, headers)
        wishes, limits, num_tokens = asked.reading.wishes, live.session.limits, asked.made.num_tokens
        left, least = limits["max_context_tokens"] - num_tokens, limits.get("min_response_tokens", 1)
        if left < least:
            raise PromptTooLongError(num_tokens, limits["max_context_tokens"] - least, wishes)
        prepared = self._placed(live, asked)
        prepared.max_tokens = min(left, limits["max_response_tokens"], wishes.max_tokens or left)
        likely = self._router.likely(live.session.id)
        prepared.engine_id = likely.id if likely else None
        return prepared

    async def count(self, live: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> int:
        """Tokens of the prompt that this call would send, sampled ids included."""
        return (await self._asked(live, body, dialect, headers)).made.num_tokens

    async def _asked(self, live: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> _Asked:
        reading, found = await self._read(live, body, dialect, headers)
        wishes = reading.wishes
        if wishes.model not in ("", live.session.model):
            raise UnknownModelError(f"model {wishes.model!r} is not served here; use {live.session.model!r}")
        validate_history(reading.units, reading.num_skipped)
        return _Asked(reading, found, await self._make(live, reading, found))

    def _placed(self, live: LiveSession, asked: _Asked) -> PreparedCall:
        """The prompt's place in the tree as it is now, after all waiting."""
        reading, found, made, tree = asked.reading, asked.found, asked.made, live.tree
        if made.base is None:
            join = tree.join(made.new, None)
            stream = tree.prompt(join, made.new[join.kept_tokens :])
        else:
            stream = tree.nodes[made.base].stream.extended(made.new)
            join = tree.join(stream.ids, made.base)
        wishes = reading.wishes
        kind = kind_of(wishes, reading.head.system, reading.units)
        cause = cause_of(tree, join, stream.length, wishes.lane, reading.units, reading.keys, made.dropped, kind)
        new_keys = [key for key in reading.keys[:-1] if key not in tree.seen] + [reading.keys[-1]]
        after = None if found is None else found.turn_id
        return PreparedCall(
            reading, kind, stream, join, cause, made.thinks, after, _behind(reading, found), new_keys, 0
        )

    async def _read(
        self, live: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str]
    ) -> tuple[ParsedRequest, _Found | None]:
        """The request, and the last stored turn that it goes on from. Read whole where that turn's stream cannot begin the prompt."""
        whole = self._renderer.pieces is None
        reading = await self._parsed(live, body, dialect, headers, whole)
        if not live.loaded or self._answered_elsewhere(live, reading):
            await self.load(live)
        found = self._find(live, reading)
        if reading.num_skipped and (found is None or not found.stands):
            reading = await self._parsed(live, body, dialect, headers, whole=True)
            found = self._find(live, reading)
        return reading, found

    async def _parsed(
        self, live: LiveSession, body: bytes, dialect: Dialect, headers: Mapping[str, str], whole: bool
    ) -> ParsedRequest:
        long = len(body) >= _THREAD_FROM_BYTES
        if long and (whole or live.reader.num_new_bytes(body) >= _THREAD_FROM_BYTES):
            return await asyncio.to_thread(live.reader.read, body, dialect, headers, whole)
        return live.reader.read(body, dialect, headers, whole)

    def _find(self, live: LiveSession, reading: ParsedRequest) -> _Found | None:
        lane, pieces = reading.wishes.lane, self._renderer.pieces
        newest = live.tree.newest(reading.units, reading.keys, lane)
        if newest is None:
            return None
        turn_id, at = newest
        new = reading.units[at + 1 :]
        sampled = any(unit.assistant and live.tree.elsewhere(unit, lane) is not None for unit in new)
        thinks = pieces is not None and live.tree.nodes[turn_id].thinks
        drops = thinks and any(not unit.assistant and pieces.others(unit)[1] for unit in new)  # type: ignore[union-attr]
        return _Found(turn_id, at, stands=pieces is not None and not sampled and not drops)

    def _answered_elsewhere(self, live: LiveSession, reading: ParsedRequest) -> bool:
        """Whether the last answer in this history is unknown here: another process may have given it."""
        for at in range(len(reading.units) - 1, -1, -1):
            if reading.units[at].assistant:
                return reading.keys[at + 1] not in live.tree.seen
        return False

    async def _make(self, live: LiveSession, reading: ParsedRequest, found: _Found | None) -> _Made:
        new_units = _behind(reading, found)
        num_chars = sum(len(message.text) for unit in new_units for message in unit.messages)
        if found is not None and found.stands and num_chars < _THREAD_FROM_CHARS:
            return self._made(live, reading, found, new_units)
        return await asyncio.to_thread(self._made, live, reading, found, new_units)

    def _made(
        self, live: LiveSession, reading: ParsedRequest, found: _Found | None, new_units: Sequence[MessageRun]
    ) -> _Made:
        try:
            if found is not None and found.stands:
                node = live.tree.nodes[found.turn_id]
                continued = self._renderer.continued(new_units, node.ended)
                thinks = continued.thinks or (node.thinks and not continued.drops)
                return _Made(continued.ids, found.turn_id, node.length + len(continued.ids), thinks)
            composed = self._renderer.composed(reading.head, reading.units, self._sampled(live, reading))
            return _Made(composed.ids, None, len(composed.ids), composed.thinks, composed.dropped)
        except NotSegmentableError:
            ids = self._renderer.full(reading.head, reading.units)
            return _Made(ids, None, len(ids), False)

    def _sampled(self, live: LiveSession, reading: ParsedRequest) -> dict[int, Ids]:
        """Answers that came back as sent: at their place in a history that was asked with, else wherever they were given."""
        found = {}
        for at, unit in enumerate(reading.units):
            if not unit.assistant:
                continue
            turn_id = live.tree.answered(reading.keys[at], unit, reading.wishes.lane)
            turn_id = live.tree.elsewhere(unit, reading.wishes.lane) if turn_id is None else turn_id
            if turn_id is not None:
                found[at] = live.tree.sampled(turn_id)
        return found

    # ------------------------------------------------------------ from the store

    async def load(self, live: LiveSession) -> None:
        """Brings the tree up to date with the store."""
        async with live.lock:
            template = self._renderer.template
            async with self._database.begin() as conn:
                rows = await turns.load_tree(conn, live.session.id, list(live.tree.known()))
                if not live.loaded:
                    await sessions.note_template(conn, live.session.rollout_id, template.digest, template.kwargs)
            for no, row in enumerate(rows, start=1):
                request, answer = unpack_json(row.request), unpack_json(row.answer)
                assert isinstance(request, dict) and isinstance(answer, dict)
                sampled = ids_from_bytes(row.sampled_ids)
                stored = answer_from_json(row.id, answer)
                thinks = request["thinks"] or stored.thinks
                keys = [bytes.fromhex(key) for key in request["keys"]]
                grown = TurnGrowth(
                    keys, stored.message, row.lane, TurnKind(row.kind), self._renderer.ended(sampled), thinks
                )
                join = AttachPoint(row.parent_turn_id, row.kept_tokens)
                live.tree.add(row.id, join, live.tree.prompt(join, ids_from_bytes(row.suffix_ids)), sampled, grown)
                if no % _LOADED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # others go first
            live.loaded = True


def _behind(reading: ParsedRequest, found: _Found | None) -> list[MessageRun]:
    """The units that follow the answer of the turn that was found, or all of them."""
    return reading.units if found is None else reading.units[found.at + 1 :]
