"""Create and kill boxes together with their ledger rows, and compute how long a box lives.

Rollouts, admissions and the sweep share this code. The ledger row is written before the box is created, so that a sweep
finds every box that was ever requested.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from uuid import UUID

import structlog

from activities.image_builds import ImageBuilds
from activities.sandboxes.base import BoxLimits, Sandbox, SandboxProvider
from ratchet.built_images import is_built
from ratchet.config import RunConfig
from ratchet.errors import (
    ConfigError,
    RatchetError,
    SandboxBusyError,
    SandboxGoneError,
    StoreUnavailableError,
    UnknownImageError,
)
from ratchet.store import sandboxes
from ratchet.store.database import Database
from ratchet.store.sandboxes import LedgerRow
from ratchet.temporal_settings import TemporalSettings

_LOG = structlog.get_logger()

INSTALLATION_KEY = "ratchet_installation"
"""Metadata key of the installation's id; a sweep kills only boxes that carry its own."""
UUID_KEY = "ratchet_box"
"""Metadata key of the ledger row's uuid, which is also the idempotency key of the create call."""


def guard_seconds(config: RunConfig, settings: TemporalSettings) -> float:
    """Return the longest time in seconds that the stages of one rollout may use together."""
    limits = config.limits
    return limits.guard_seconds or limits.agent_seconds + limits.eval_seconds + settings.rollout.guard_margin


def box_ttl_seconds(config: RunConfig, settings: TemporalSettings, max_ttl_seconds: int) -> int:
    """Return a box's time to live in seconds: the guard and a margin, at most `max_ttl_seconds`.

    Raises ConfigError if the service allows less than the guard.
    """
    guard = guard_seconds(config, settings)
    if max_ttl_seconds < guard:
        raise ConfigError(
            f"a rollout may take {guard:.0f} s (its limits), and boxes of this service live {max_ttl_seconds} s at most"
            " (RATCHET_SANDBOX_MAX_TTL_SECONDS); lower limits.agent_seconds, eval_seconds or guard_seconds"
        )
    return int(min(max_ttl_seconds, guard + settings.rollout.ttl_margin))


class BoxCreator:
    """Creates boxes of this installation. `builds`: makes the images that come as Dockerfiles."""

    def __init__(
        self, database: Database, provider: SandboxProvider, installation: UUID, builds: ImageBuilds | None = None
    ) -> None:
        self.database = database
        self.provider = provider
        self.installation = installation
        self.builds = builds

    def require_not_building(self, image: str) -> None:
        """Raise SandboxBusyError if the image is being built, as far as this process knows: no row is needed yet."""
        if self.builds is not None:
            self.builds.require_not_under_way(image)

    async def create(
        self,
        row: LedgerRow,
        image: str,
        *,
        ttl_seconds: int,
        network: bool,
        metadata: Mapping[str, str] | None = None,
        limits: BoxLimits | None = None,
    ) -> str:
        """Create the box of a ledger row and return the provider's id that the ledger holds afterwards.

        That is the id of another try's box if that try was faster; the box made here is killed then. Raises
        SandboxGoneError if the box is not wanted any more, and the provider's own errors, which the ledger then holds.
        If the image has yet to be built, the row is given up and SandboxBusyError raised.
        """
        try:
            box = await self.provider.create(
                image,
                ttl_seconds=ttl_seconds,
                metadata={INSTALLATION_KEY: str(self.installation), UUID_KEY: str(row.uuid), **(metadata or {})},
                idempotency_key=str(row.uuid),
                network=network,
                limits=limits,
            )
        except RatchetError as error:
            if isinstance(error, UnknownImageError) and is_built(image) and self.builds is not None:
                # Its place is for boxes that can be made now.
                await kill_and_record(self.database, self.provider, [row])
                await self.builds.raise_state(image)
            is_waiting = isinstance(error, SandboxBusyError) and error.is_full
            with suppress(StoreUnavailableError):  # the provider's error is what the caller has to know
                async with self.database.begin() as connection:
                    words = "" if is_waiting else str(error)
                    await sandboxes.set_boot_error(connection, row.id, words)
            raise
        await box.close()
        async with self.database.begin() as connection:
            held = await sandboxes.set_sandbox_live(connection, row.id, box.id)
        if held != box.id:
            await self.provider.kill(box.id)
        if held is None:
            raise SandboxGoneError(f"box {row.id} was given up while it was being made")
        return held


@asynccontextmanager
async def connected_box(provider: SandboxProvider, provider_id: str) -> AsyncIterator[Sandbox]:
    """Connect to a box for the duration of the block; the box lives on."""
    box = await provider.connect(provider_id)
    try:
        yield box
    finally:
        with suppress(RatchetError):
            await box.close()


async def kill_and_record(database: Database, provider: SandboxProvider, rows: Sequence[LedgerRow]) -> None:
    """Kill boxes that are marked for release, and record it; a missing box counts as killed.

    Raises SandboxBusyError, so that the call waits for the service. A box that cannot be killed for another reason
    stays marked, for the sweep. A row without provider id may still get a box from a create call in progress.
    `BoxCreator.create` kills that box when it finds the row released, and the sweep kills it otherwise.
    """
    dead = [row.id for row in rows if row.provider_id is None or await is_killed(provider, row.provider_id, waits=True)]
    async with database.begin() as connection:
        await sandboxes.mark_released(connection, dead)


async def try_kill_box(database: Database, provider: SandboxProvider, sandbox_id: int, provider_id: str) -> None:
    """Kill a box whose result is stored. If this fails, `release` and the sweep will kill it."""
    if not await is_killed(provider, provider_id):
        return
    try:
        async with database.begin() as connection:
            await sandboxes.mark_released(connection, [sandbox_id])
    except StoreUnavailableError as error:
        _LOG.warning("killed box not recorded", sandbox_id=sandbox_id, reason=str(error))


async def is_killed(provider: SandboxProvider, provider_id: str, waits: bool = False) -> bool:
    """Kill a box and return whether it is gone.

    No error is raised, except SandboxBusyError if the caller `waits`: what becomes of a box that is not needed any more
    decides nothing about a result.
    """
    try:
        await provider.kill(provider_id)
    except SandboxGoneError:
        return True
    except Exception as error:
        if waits and isinstance(error, SandboxBusyError):
            raise
        _LOG.warning("box not killed yet", box=provider_id, reason=f"{type(error).__name__}: {error}")
        return False
    return True
