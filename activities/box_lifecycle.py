"""Create and kill boxes together with their ledger rows, and compute how long a box lives.

Rollouts, admissions and the sweep share this code. The ledger row is written before the box is created, so that a sweep
finds every box that was ever requested.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from uuid import UUID, uuid5

import structlog

from activities.image_builds import ImageBuilds
from ratchet.built_images import is_built
from ratchet.config import RunConfig
from ratchet.errors import (
    ConfigError,
    RatchetError,
    SandboxBusyError,
    SandboxFullError,
    SandboxGoneError,
    StoreUnavailableError,
    UnknownImageError,
)
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import PRE_COMMANDS, SandboxRole
from sandboxes.base import BoxLimits, Network, OpenedFirst, Sandbox, SandboxInfo, SandboxProvider
from store import installations, sandboxes
from store.database import Database
from store.installations import Installation
from store.sandboxes import LedgerRow

_LOG = structlog.get_logger()

INSTALLATION_KEY = "ratchet_installation"
"""Metadata key of the installation's id. `kill_own_box` kills only boxes that carry one of its own."""
UUID_KEY = "ratchet_box"
"""Metadata key of the ledger row's uuid."""


def guard_seconds(config: RunConfig, settings: TemporalSettings) -> float:
    """Return the longest time in seconds that the stages of one rollout may use together."""
    limits = config.limits
    return limits.guard_seconds or limits.agent_seconds + limits.eval_seconds + settings.rollout.guard_margin


def box_ttl_seconds(config: RunConfig, settings: TemporalSettings, max_ttl_seconds: int) -> int:
    """Return the guard plus a margin, at most `max_ttl_seconds`. Raises ConfigError if that is below the guard."""
    guard = guard_seconds(config, settings)
    if max_ttl_seconds < guard:
        raise ConfigError(
            f"a rollout may take {guard:.0f} s (its limits), and boxes of this service live {max_ttl_seconds} s at most"
            " (RATCHET_SANDBOX_MAX_TTL_SECONDS); lower limits.agent_seconds, eval_seconds or guard_seconds"
        )
    return int(min(max_ttl_seconds, guard + settings.rollout.ttl_margin))


def network_of(role: SandboxRole, opened: Collection[str]) -> Network:
    """Return the network of a new box. `opened`: of the run and the task, as `sandbox.network`."""
    if role in opened:
        return "open"
    is_agents = role is SandboxRole.AGENT
    return OpenedFirst(is_agents) if PRE_COMMANDS in opened else is_agents


class BoxCreator:
    """Creates boxes of this installation. `builds`: makes the images that come as Dockerfiles."""

    def __init__(self, database: Database, provider: SandboxProvider, builds: ImageBuilds | None = None) -> None:
        self.database = database
        self.provider = provider
        self.builds = builds

    def require_not_building(self, image: str) -> None:
        """Raise SandboxFullError if the image is being built, as far as this process knows: no row is needed yet."""
        if self.builds is not None:
            self.builds.require_not_under_way(image)

    async def create(
        self,
        row: LedgerRow,
        image: str,
        *,
        ttl_seconds: int,
        network: Network,
        metadata: Mapping[str, str] | None = None,
        limits: BoxLimits | None = None,
    ) -> str:
        """Create the box of a ledger row and return the provider's id that the ledger holds afterwards.

        That is the id of another try's box if that try was faster; the box made here is killed then. Raises
        SandboxGoneError if the box is not wanted any more, and the provider's own errors, which the ledger then holds.
        If the image has yet to be built, the row is given up and SandboxFullError raised.
        """
        installation = await self.database.run(installations.installation_id)
        try:
            box = await self.provider.create(
                image,
                ttl_seconds=ttl_seconds,
                metadata={INSTALLATION_KEY: str(installation), UUID_KEY: str(row.uuid), **(metadata or {})},
                idempotency_key=str(uuid5(installation, str(row.uuid))),  # a copy of the ledger has the same rows
                network=network,
                limits=limits,
            )
        except RatchetError as error:
            if isinstance(error, UnknownImageError) and is_built(image) and self.builds is not None:
                # Its place is for boxes that can be made now.
                await kill_and_record(self.database, self.provider, [row])
                await self.builds.raise_state(image)
            with suppress(StoreUnavailableError):  # the provider's error is what the caller has to know
                async with self.database.begin() as connection:
                    words = "" if isinstance(error, SandboxFullError) else str(error)
                    await sandboxes.set_boot_error(connection, row.id, words)
            raise
        await box.close()
        held = await self.database.run(sandboxes.set_sandbox_live, row.id, box.id)
        if held != box.id:
            await kill_own_box(self.database, self.provider, box.id, row.id)
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


@dataclass(frozen=True, slots=True)
class BoxEnd:
    """`is_over`: the box is gone or another installation's. `left_to`: why it was not killed, or empty."""

    is_over: bool
    left_to: str = ""


async def kill_and_record(database: Database, provider: SandboxProvider, rows: Sequence[LedgerRow]) -> None:
    """Kill boxes that are marked for release, and record it; a missing box counts as killed.

    Raises SandboxBusyError, so that the call waits for the service. A box that cannot be killed for another reason
    stays marked, for the sweep. A row without provider id may still get a box from a create call in progress.
    `BoxCreator.create` kills that box when it finds the row released, and the sweep kills it otherwise.
    """
    for row in rows:
        await release_box(database, provider, row.id, row.provider_id, waits=True)


async def try_kill_box(database: Database, provider: SandboxProvider, sandbox_id: int, provider_id: str) -> None:
    """Kill a box whose result is stored. If this fails, `release` and the sweep will kill it."""
    try:
        await release_box(database, provider, sandbox_id, provider_id)
    except StoreUnavailableError as error:
        _LOG.warning("box not killed, or not recorded", sandbox_id=sandbox_id, reason=str(error))


async def release_box(
    database: Database, provider: SandboxProvider, sandbox_id: int, provider_id: str | None, waits: bool = False
) -> bool:
    """Kill the box of a row, if it has one, and record it; return whether the row is released."""
    end = BoxEnd(is_over=True)
    if provider_id is not None:
        end = await kill_own_box(database, provider, provider_id, sandbox_id, waits)
    if end.is_over:
        await database.run(sandboxes.mark_released, sandbox_id, end.left_to)
    return end.is_over


async def kill_own_box(
    database: Database, provider: SandboxProvider, provider_id: str, sandbox_id: int | None = None, waits: bool = False
) -> BoxEnd:
    """Kill a box that carries the marks of this installation, and of the row `sandbox_id` if it has one, as the service
    itself tells.

    Neither a listing nor the ledger is proof: a service may ignore the listing's filter or give an id to another box,
    and a ledger may be a copy. Raises StoreUnavailableError, and SandboxBusyError if the caller `waits`; what else
    becomes of a box that is not needed any more decides nothing about a result.
    """
    async with database.begin() as connection:
        installation = await installations.installation(connection)
        mark = None if sandbox_id is None else await sandboxes.box_mark(connection, sandbox_id)
    try:
        end = _whose(await provider.describe(provider_id), installation, mark)
        if end.is_over and not end.left_to:
            await provider.kill(provider_id)
    except SandboxGoneError:
        return BoxEnd(is_over=True)
    except Exception as error:
        if waits and isinstance(error, SandboxBusyError):
            raise
        _LOG.warning("box not killed yet", box=provider_id, reason=f"{type(error).__name__}: {error}")
        return BoxEnd(is_over=False)
    if end.left_to:
        _LOG.warning("box not killed", box=provider_id, reason=end.left_to, remedy=installation.copy_warning)
    return end


def _whose(info: SandboxInfo, installation: Installation, mark: UUID | None) -> BoxEnd:
    """Say if the box may be killed. One without marks may not: it ends with its time to live."""
    carried = info.metadata.get(INSTALLATION_KEY)
    if carried is None:
        return BoxEnd(is_over=False, left_to=f"the service tells no {INSTALLATION_KEY} of it; it ends by itself")
    if carried not in installation.own_ids:
        return BoxEnd(is_over=True, left_to=f"left to installation {carried}, which it belongs to")
    if mark is not None and info.metadata.get(UUID_KEY) != str(mark):
        return BoxEnd(is_over=True, left_to="gone; the service has given its id to another box")
    return BoxEnd(is_over=True)
