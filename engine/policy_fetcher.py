"""Bring published versions to the engine's node, before the update that loads them.

An engine generates while its next version is fetched, and the pause lasts for loading only: `learn.sync` waits until
the engine's row says that the version is here. What a fetch waits for is in the same row (`EngineRow.fetch_error`).
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import structlog

from engine import adapter_files
from engine.policy_cache import KEPT_VERSIONS, PolicyCache
from engine.policy_files import is_address, is_intact, policy_directory
from engine.weight_storage import DamagedVersionError
from ratchet.background_task import errors_logged, in_abandonable_thread
from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import StoreUnavailableError, WeightStorageError
from ratchet.lora_slots import FIRST_SLOT
from ratchet.types import JsonObject
from store import engines
from store.database import Database
from store.engines import PublishedPolicy

_LOG = structlog.get_logger("ratchet.engine")
_LOOK_SECONDS = 1.0
_REST_SECONDS = 10.0
"""Time between two looks while no run has its weights at an address."""
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 30.0
_TRIES_IF_DAMAGED = 3
"""The number of times that a version is fetched whose files do not match its row, before an older version is served."""


class PolicyFetcher:
    """The versions of an engine's node, those of its set. `slots`: the engine's. `engine_id`: set once registered."""

    def __init__(
        self, database: Database, root: Path, engine_set: str = DEFAULT_SET, slots: Sequence[int] = (FIRST_SLOT,)
    ) -> None:
        self.database = database
        self.root = root
        self.engine_set = engine_set
        self.slots = slots
        self.engine_id = 0
        num_kept = KEPT_VERSIONS * len(slots)
        self._cache = PolicyCache(root, num_kept)
        self._fetched: deque[str] = deque(maxlen=num_kept)
        self._damaged: Counter[str] = Counter()
        self._reported: JsonObject = {}

    async def published(self, most: int | None = None, slot: int = FIRST_SLOT) -> list[PublishedPolicy]:
        """Return the versions that a slot of the engine may serve, newest first, at most `most`."""
        return await self.database.run(engines.newest_published_policies, self.engine_set, most, slot)

    async def newest_intact(
        self, loaded: str | None, only_here: bool = False, slot: int = FIRST_SLOT
    ) -> PublishedPolicy | None:
        """Return the newest version published for a slot whose files are here with their digests, or None.

        Waits while the storage of weights is unavailable. `loaded`: a version that is not checked again. `only_here`
        fetches nothing if some version is here already.
        """
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                policies = await self.published(slot=slot)
                if only_here and (found := await self._first_intact(policies, loaded, is_fetching=False)):
                    return found
                return await self._first_intact(policies, loaded, is_fetching=True)
            except WeightStorageError as error:
                await self._report(str(error))
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def keep_fetching(self) -> None:
        """Fetch every new version, until cancelled."""
        wait = _LOOK_SECONDS
        while True:
            try:
                found = [await self._fetch_newest(slot) for slot in self.slots]
                wait = _LOOK_SECONDS if any(found) else _REST_SECONDS
            except WeightStorageError as error:
                await self._report(str(error))
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
            except StoreUnavailableError:
                pass
            except Exception as error:  # a bug: the engine goes on with the weights that it has, and says so
                await self._report(repr(error))
                wait = _LONGEST_WAIT_SECONDS
            await asyncio.sleep(wait)

    async def _fetch_newest(self, slot: int) -> bool:
        """Return whether the slot's newest version is at an address; it is here then."""
        newest = await self.published(most=1, slot=slot)
        if not newest or not is_address(newest[0].uri):
            return False
        if newest[0].version not in self._fetched:
            await self._fetch(newest[0], await self.published(slot=slot))
        await self._report(None)
        return True

    async def _first_intact(
        self, policies: Sequence[PublishedPolicy], loaded: str | None, is_fetching: bool
    ) -> PublishedPolicy | None:
        for policy in policies:
            if policy.version == loaded:
                return policy
            try:
                if await self._is_intact(policy, policies, is_fetching):
                    return policy
            except DamagedVersionError:
                self._damaged[policy.version] += 1
                if self._damaged[policy.version] < _TRIES_IF_DAMAGED:
                    raise
            if is_fetching or not is_address(policy.uri):
                _LOG.error(
                    "policy cannot be served: files are missing or differ", version=policy.version, uri=policy.uri
                )
        return None

    async def _is_intact(self, policy: PublishedPolicy, policies: Sequence[PublishedPolicy], is_fetching: bool) -> bool:
        """Return whether the files are here with their digests. Raises WeightStorageError if they are fetched."""
        directory = policy_directory(policy.uri, self.root)
        if is_fetching and is_address(policy.uri):
            await self._fetch(policy, policies)
        if await asyncio.to_thread(is_intact, directory, policy.files):
            return True
        if not is_address(policy.uri):
            return False
        if directory.is_dir():  # a copy that has changed on the disk; the next fetch makes it anew
            for changed in (directory, _base_of(directory, policy)):
                if changed is not None:
                    await asyncio.to_thread(self._cache.discard, changed)
            if policy.version in self._fetched:
                self._fetched.remove(policy.version)
            if is_fetching:
                raise DamagedVersionError(f"{directory}: files have changed on the disk")
        return False

    async def _fetch(self, policy: PublishedPolicy, policies: Sequence[PublishedPolicy]) -> None:
        """Fetch a version and, if it is an adapter, its base, which is among `policies`.

        Raises WeightStorageError. If the engine ends, the thread is left behind: a back end may wait long.
        """
        started = time.monotonic()
        directory = await in_abandonable_thread(lambda: self._cache.fetch(policy.uri, policy.files))
        at = _base_of(directory, policy)
        base = next((one for one in policies if policy_directory(one.uri, self.root).resolve() == at), None)
        if base is not None:
            await in_abandonable_thread(lambda: self._cache.fetch(base.uri, base.files))
        if policy.version not in self._fetched:
            self._fetched.append(policy.version)
            _LOG.info("policy fetched", version=policy.version, seconds=round(time.monotonic() - started, 3))
        await self._report(None)

    async def _report(self, error: str | None) -> None:
        """Write to the engine's row which versions are here, and what the fetch of the next one waits for."""
        if error is not None:
            _LOG.warning("waiting for the storage of weights", reason=error)
        details: JsonObject = {engines.FETCHED: list(self._fetched), engines.FETCH_ERROR: error}
        if details == self._reported:
            return
        with errors_logged("fetched versions not reported"):  # the next call of keep_fetching writes it
            await self.database.run(engines.set_engine_details, self.engine_id, details)
            self._reported = details


def _base_of(directory: Path, policy: PublishedPolicy) -> Path | None:
    """Return the directory of an adapter's base, None if the version is no adapter."""
    if not adapter_files.is_adapter(file["name"] for file in policy.files):
        return None
    return adapter_files.read_base(directory).directory
