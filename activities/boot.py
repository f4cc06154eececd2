"""Stage `boot`: a box exists, exactly once, whatever dies on the way. And its end: `release`.

Why here: the ledger row is written before the box, so that a sweep can find every box that was ever asked for.
Called by: the `Rollout` workflow; `try_kill_box` also by the stages that are done with their box.
"""

import asyncio
import random
from collections.abc import Sequence
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.run_configs import RunConfigs
from activities.sandboxes.base import BoxLimits, SandboxProvider
from activities.stage import activity_stage, heartbeating
from ratchet.config import RunConfig, SandboxConfig
from ratchet.errors import SandboxBusyError, SandboxGoneError
from ratchet.payloads import LiveSandbox, StageInput, StageResult
from ratchet.store import rollouts, sandboxes, sessions, tasks
from ratchet.store.database import Database
from ratchet.store.sandboxes import LedgerRow
from ratchet.types import MODEL_NAME, SandboxRole, SandboxState

_LOG = structlog.get_logger()

INSTALLATION_KEY = "ratchet_installation"
UUID_KEY = "ratchet_box"
_WAIT_FOR_ROOM_SECONDS = 60.0


class BootActivities:
    def __init__(self, database: Database, provider: SandboxProvider, configs: RunConfigs, installation: UUID) -> None:
        self.database, self.provider, self.configs, self.installation = database, provider, configs, installation
        self._lines = {role: asyncio.Lock() for role in SandboxRole}

    @activity_stage("boot")
    async def boot(self, input: StageInput) -> LiveSandbox:
        """A live, unused box for this attempt and role; the box of an earlier try is adopted."""
        config = await self.configs.of_rollout(input.rollout_id)
        ttl_seconds = self.configs.ttl_seconds(config, self.provider.capabilities.max_ttl_seconds)
        async with heartbeating():
            row, image = await self._ledger_row(input, config)
            if row.state == SandboxState.LIVE and row.provider_id is not None:
                return LiveSandbox(sandbox_id=row.id, provider_id=row.provider_id)
            box = await self.provider.create(
                image,
                ttl_seconds=ttl_seconds,
                metadata={
                    INSTALLATION_KEY: str(self.installation),
                    UUID_KEY: str(row.uuid),
                    "ratchet_rollout": str(input.rollout_id),
                },
                idempotency_key=str(row.uuid),
                network=input.role is SandboxRole.AGENT,
                limits=_limits(config.sandbox),
            )
            await box.close()
            async with self.database.begin() as connection:
                held = await sandboxes.set_sandbox_live(connection, row.id, box.id)
            if held != box.id:
                await self.provider.kill(box.id)
            if held is None:
                raise SandboxGoneError(f"box {row.id} was given up while it was being made")
            return LiveSandbox(sandbox_id=row.id, provider_id=held)

    async def _ledger_row(self, input: StageInput, config: RunConfig) -> tuple[LedgerRow, str]:
        """The row of an earlier try, or a new one as soon as there is room; and the task's image.

        Waits here for a while, because a bounced try costs more than a look into the ledger. One boot looks and the others stand in
        line behind it: in a full house that is the difference between three looks a second and fifty.
        """
        info = activity.info()
        assert info.workflow_id is not None and info.workflow_run_id is not None
        async with self.database.begin() as connection:
            if input.role is SandboxRole.AGENT:
                await self._open_attempt(connection, input, info.workflow_run_id, config)
            image = (await tasks.task_of_rollout(connection, input.rollout_id)).image
            whose = (input.rollout_id, input.attempt, input.role, info.workflow_id)
            row = await sandboxes.unused_sandboxes(connection, *whose)
        if row is not None:  # an earlier try has its room already
            return row, image
        values = {
            "provider": self.provider.name,
            "role": input.role,
            "rollout_id": input.rollout_id,
            "attempt": input.attempt,
            "workflow_id": info.workflow_id,
            "image": image,
        }
        try:
            async with asyncio.timeout(_WAIT_FOR_ROOM_SECONDS), self._lines[input.role]:
                while True:
                    async with self.database.begin() as connection:
                        row = await sandboxes.unused_sandboxes(connection, *whose)
                        if row is None:
                            row = await sandboxes.reserve_sandbox(connection, values, config.sandbox.max_boxes)
                    if row is not None:
                        return row, image
                    await asyncio.sleep(random.uniform(0.2, 0.5))
        except TimeoutError:
            raise SandboxBusyError(
                f"all {config.sandbox.max_boxes} boxes (sandbox.max_boxes) are taken", retry_after_seconds=5
            ) from None

    async def _open_attempt(
        self, connection: AsyncConnection, input: StageInput, owner: str, config: RunConfig
    ) -> None:
        """The attempt and its session exist; both statements are idempotent."""
        await rollouts.open_attempt(connection, input.rollout_id, input.attempt, owner)
        temperature = await rollouts.temperature_of(connection, input.rollout_id)
        limits: dict[str, int | None] = {
            "max_context_tokens": config.sampling.max_context_tokens,
            "max_response_tokens": config.sampling.max_response_tokens,
            "min_response_tokens": config.sampling.min_response_tokens,
            "max_turns": config.harness.max_turns,
        }
        await sessions.open_session(connection, input.rollout_id, input.attempt, temperature, MODEL_NAME, limits)

    @activity_stage("release")
    async def release(self, input: StageInput) -> StageResult:
        """Ends whatever boxes the rollout still holds."""
        async with self.database.begin() as connection:
            rows = await sandboxes.want_release_of_rollout(connection, input.rollout_id, "rollout ended")
        await kill_and_record(self.database, self.provider, rows)
        return StageResult()


def _limits(config: SandboxConfig) -> BoxLimits:
    memory = None if config.memory_mib is None else config.memory_mib << 20
    return BoxLimits(memory_bytes=memory, num_cpus=config.cpus, max_processes=config.max_processes)


async def kill_and_record(database: Database, provider: SandboxProvider, rows: Sequence[LedgerRow]) -> None:
    """Kills boxes whose release is recorded as wanted; a box that is gone already counts as killed."""
    for row in rows:
        if row.provider_id is not None:
            await provider.kill(row.provider_id)
    # A row without provider id may still get a box from a create in flight; `boot` kills that one when it finds its row unwanted,
    # and the sweep whatever is left after the grace.
    async with database.begin() as connection:
        await sandboxes.mark_released(connection, [row.id for row in rows])


async def try_kill_box(database: Database, provider: SandboxProvider, sandbox_id: int, provider_id: str) -> None:
    """Ends a box whose work is stored. A failure is left to `release` and the sweep: the stage itself has succeeded."""
    try:
        await provider.kill(provider_id)
        async with database.begin() as connection:
            await sandboxes.mark_released(connection, [sandbox_id])
    except SandboxBusyError as error:
        _LOG.warning("box not killed yet", sandbox_id=sandbox_id, reason=str(error))
