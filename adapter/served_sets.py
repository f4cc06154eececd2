"""The parts that answer the calls of each engine set: its model's tokenizer and template, vLLM's parsers, the capture.

Sets that serve the same model in the same way share all of it. Sets come and go while calls are answered: what a new
one needs is made at its first call, and the calls of a set that is not served are held, as while the store is away.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from adapter.output_parser import OutputParser
from adapter.prompt.renderer import Renderer
from adapter.settings import AdapterSettings
from adapter.store_outage import StoreOutage
from adapter.turns.capture import Capture
from adapter.turns.engine_waits import EngineWaits
from adapter.turns.routing import EngineRouter
from adapter.vllm_parsers import VllmParsers
from ratchet.errors import ConfigError
from store.database import Database
from store.sessions import SessionRow

_LOG = structlog.get_logger("ratchet.adapter")
_LOOK_SECONDS = 2.0
_RETRY_SECONDS = 30.0
"""After which the tokenizer of a set that could not be used is read again; also if the plan changes."""
_UNUSED_SECONDS = 60.0
"""After which what a changed or removed set needed is dropped: longer than a call takes to begin."""

ReadSets = Callable[[], Mapping[str, AdapterSettings]]
"""Returns engine set → the settings for its calls; the same mapping for as long as nothing has changed."""
MakeRenderer = Callable[[AdapterSettings], Renderer]
"""Reads tokenizer and template of the settings' model. Raises ConfigError if they cannot be used."""


_T = TypeVar("_T")


def renderer_of(settings: AdapterSettings) -> Renderer:
    return Renderer(settings.model_path, settings.template_kwargs, settings.stop_token_ids)


class SetNotServedError(Exception):
    """The session's engine set is not served now; its calls are held."""


@dataclass(frozen=True, slots=True)
class SetParts:
    """The parts that depend on the model of a set."""

    capture: Capture
    parser: VllmParsers


@dataclass(eq=False, repr=False)
class ServedSets:
    """The parts by engine set. `unusable`: why a set's calls wait, for its model's tokenizer or template.

    `_settings`: of the set that is asked for first. `_read_sets`: None if every set has these settings. The parts of
    the first set that can be used are made at once. Raises ConfigError if there is none.
    """

    _settings: AdapterSettings
    _database: Database
    _router: EngineRouter
    _outage: StoreOutage
    _waits: EngineWaits
    _read_sets: ReadSets | None
    _make_renderer: MakeRenderer = renderer_of

    def __post_init__(self) -> None:
        self._sets: Mapping[str, AdapterSettings] = {} if self._read_sets is None else self._read_sets()
        self._of_set: dict[str, SetParts] = {}
        self._made: dict[str, SetParts] = {}  # by their settings as JSON
        self._unused_since: dict[str, float] = {}  # by the same, monotonic clock
        self._retry_at: dict[str, float] = {}  # by set, monotonic clock
        self._making = asyncio.Lock()
        self.unusable: dict[str, str] = {}
        self.first = self._add_first(self._settings)

    def _add_first(self, settings: AdapterSettings) -> SetParts:
        try:
            return self._add(settings, self._make_renderer(settings))
        except ConfigError:
            for engine_set, other in self._sets.items():
                try:
                    return self._add(other, self._make_renderer(other))
                except ConfigError as error:
                    self._note_unusable(engine_set, error)
            raise

    def _note_unusable(self, engine_set: str, error: ConfigError) -> None:
        _LOG.error("engine set cannot be served, its calls wait", engine_set=engine_set, reason=str(error))
        self.unusable[engine_set] = str(error)
        self._retry_at[engine_set] = time.monotonic() + _RETRY_SECONDS

    def all(self) -> list[SetParts]:
        return list(self._made.values())

    async def keep_reading(self) -> None:
        """Read every two seconds which sets are served, until cancelled; drop the parts of those that are not any more.

        The file system may hang, so it is read in a thread and not for each call.
        """
        while self._read_sets is not None:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                sets = await asyncio.to_thread(self._read_sets)
                if sets is not self._sets:
                    self._sets = sets
                    self._of_set.clear()
                    self._retry_at.clear()
                    self.unusable.clear()
                await self._drop_unused()
            except Exception:  # if this loop ended, no set would be added any more
                _LOG.exception("the engine sets cannot be read; those of before are served")

    async def _drop_unused(self) -> None:
        used = {settings.model_dump_json() for settings in self._sets.values()}
        now = time.monotonic()
        for key, parts in list(self._made.items()):
            if key in used or parts is self.first or parts.capture.is_busy:
                self._unused_since.pop(key, None)
            elif now - self._unused_since.setdefault(key, now) >= _UNUSED_SECONDS:
                del self._made[key]
                del self._unused_since[key]
                await parts.capture.close()

    async def of(self, session: SessionRow) -> SetParts:
        """Return what answers a session's calls. Raises SetNotServedError."""
        if (found := self._known(session)) is not None:
            return found
        engine_set, settings = session.engine_set, self._sets.get(session.engine_set)
        if session.endpoint is not None and session.endpoint.tokens and session.engine is not None:
            engine_set = f"of {session.run_id}'s endpoint"
            settings = self._settings.of_model(Path(session.model_path), session.engine)
        if settings is None:
            raise SetNotServedError(f"engine set {engine_set} is not served")
        if time.monotonic() < self._retry_at.get(engine_set, 0.0):
            raise SetNotServedError(self.unusable[engine_set])
        return await self._make(engine_set, settings)

    async def hold(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `work` returns, repeated until the engine set that it asks for is served and the store answers.

        `work` authenticates its client each time, so that the calls of a session that is closed end.
        """
        while True:
            with contextlib.suppress(SetNotServedError):
                return await self._outage.hold(work)
            await asyncio.sleep(_LOOK_SECONDS)

    def _known(self, session: SessionRow) -> SetParts | None:
        """Return the parts, if they are made. Any parts do for an endpoint whose answers are not stored as tokens."""
        if session.endpoint is not None and session.endpoint.tokens:
            return None
        if self._read_sets is None or (session.endpoint is not None and session.engine_set not in self._sets):
            return self.first
        return self._of_set.get(session.engine_set)

    async def _make(self, engine_set: str, settings: AdapterSettings) -> SetParts:
        key = settings.model_dump_json()
        async with self._making:
            if key not in self._made:
                try:
                    self._add(settings, await asyncio.to_thread(self._make_renderer, settings))
                except ConfigError as error:
                    self._note_unusable(engine_set, error)
                    raise SetNotServedError(str(error)) from error
                _LOG.info("engine set is served", engine_set=engine_set, model=str(settings.model_path))
            found = self._made[key]
            self._unused_since.pop(key, None)
        if self._sets.get(engine_set) is settings:
            self._of_set[engine_set] = found
        self.unusable.pop(engine_set, None)
        return found

    def _add(self, settings: AdapterSettings, renderer: Renderer) -> SetParts:
        parser = VllmParsers(
            settings.model_path, settings.tool_parser, settings.reasoning_parser, settings.template_kwargs
        )
        outputs = OutputParser(renderer, parser)
        capture = Capture(settings, self._database, renderer, outputs, self._router, self._outage, self._waits)
        self._made[settings.model_dump_json()] = made = SetParts(capture, parser)
        return made

    async def close(self) -> None:
        for parts in self.all():
            await parts.capture.close()
