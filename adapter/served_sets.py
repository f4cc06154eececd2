"""What answers the calls of each engine set: its model's tokenizer and template, vLLM's parsers, and the capture.

Sets that serve the same model in the same way share all of it. Sets come and go while calls are answered: what a new
one needs is made at its first call, and the calls of a set that is not served are held, as while the store is away.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import structlog

from adapter.output_parser import OutputParser
from adapter.prompt.renderer import Renderer
from adapter.settings import AdapterSettings
from adapter.store_outage import StoreOutage
from adapter.turns.capture import Capture
from adapter.turns.routing import EngineRouter
from adapter.vllm_parsers import VllmParsers
from ratchet.store.database import Database
from ratchet.store.sessions import SessionRow

_LOG = structlog.get_logger("ratchet.adapter")
_LOOK_SECONDS = 1.0

ReadSets = Callable[[], Mapping[str, AdapterSettings]]
"""Returns engine set → the settings for its calls; the same mapping for as long as nothing has changed."""


_T = TypeVar("_T")


class SetNotServedError(Exception):
    """The session's engine set is not served now; its calls are held."""


@dataclass(frozen=True, slots=True)
class SetParts:
    """The parts that depend on the model of a set."""

    capture: Capture
    parser: VllmParsers


class ServedSets:
    """The parts of all engine sets that this process has answered."""

    def __init__(
        self,
        settings: AdapterSettings,
        database: Database,
        router: EngineRouter,
        outage: StoreOutage,
        read_sets: ReadSets | None,
    ) -> None:
        """`settings`: of the set that is asked for first, whose tokenizer and template are read at once. `read_sets`:
        None if every set has these settings. Raises ConfigError if the tokenizer or the template cannot be used.
        """
        self._database = database
        self._router = router
        self._outage = outage
        self._read_sets = read_sets
        self._sets: Mapping[str, AdapterSettings] = {}
        self._of_set: dict[str, SetParts] = {}
        self._made: dict[str, SetParts] = {}  # by their settings as JSON
        self._making = asyncio.Lock()
        self.first = self._add(settings, _renderer(settings))

    def all(self) -> list[SetParts]:
        return list(self._made.values())

    async def of(self, session: SessionRow) -> SetParts:
        """Return what answers a session's calls.

        Raises SetNotServedError, and ConfigError if the tokenizer or the template of its model cannot be used.
        """
        if (found := self._known(session)) is not None:
            return found
        if (settings := self._sets.get(session.engine_set)) is not None:
            return await self._make(session.engine_set, settings)
        raise SetNotServedError(f"engine set {session.engine_set} is not served")

    async def hold(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `work` returns, repeated until the engine set that it asks for is served and the store answers.

        `work` authenticates its client each time, so that the calls of a session that is closed end.
        """
        while True:
            with contextlib.suppress(SetNotServedError):
                return await self._outage.hold(work)
            await asyncio.sleep(_LOOK_SECONDS)

    def _known(self, session: SessionRow) -> SetParts | None:
        """Return the parts, if they are made. An endpoint is called without a tokenizer, so any parts do."""
        if self._read_sets is None:
            return self.first
        sets = self._read_sets()
        if sets is not self._sets:
            self._sets = sets
            self._of_set.clear()
        if session.endpoint is not None and session.engine_set not in sets:
            return self.first
        return self._of_set.get(session.engine_set)

    async def _make(self, engine_set: str, settings: AdapterSettings) -> SetParts:
        key = settings.model_dump_json()
        async with self._making:
            if key not in self._made:
                self._add(settings, await asyncio.to_thread(_renderer, settings))
                _LOG.info("engine set is served", engine_set=engine_set, model=str(settings.model_path))
        found = self._made[key]
        if self._sets.get(engine_set) is settings:
            self._of_set[engine_set] = found
        return found

    def _add(self, settings: AdapterSettings, renderer: Renderer) -> SetParts:
        parser = VllmParsers(
            settings.model_path, settings.tool_parser, settings.reasoning_parser, settings.template_kwargs
        )
        outputs = OutputParser(renderer, parser)
        capture = Capture(settings, self._database, renderer, outputs, self._router, self._outage)
        self._made[settings.model_dump_json()] = made = SetParts(capture, parser)
        return made

    async def close(self) -> None:
        for parts in self.all():
            await parts.capture.close()


def _renderer(settings: AdapterSettings) -> Renderer:
    return Renderer(settings.model_path, settings.template_kwargs, settings.stop_token_ids)
