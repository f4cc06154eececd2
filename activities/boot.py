"""Stages `boot` and `release`: create the box of a rollout idempotently, and kill the boxes that it still holds."""

import asyncio
import random
import time
from dataclasses import dataclass

import psutil
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.box_lifecycle import BoxCreator, box_ttl_seconds, guard_seconds, kill_and_record, network_of
from activities.guard import require_wall_time
from activities.image_builds import ImageBuilds
from activities.stage import activity_stage, heartbeating
from activities.stage_context import BoxActivities
from activities.worker_lateness import WorkerLateness
from ratchet.config import RunConfig, SandboxConfig
from ratchet.errors import SandboxFullError
from ratchet.payloads import LiveSandbox, StageInput, StageResult
from ratchet.types import MODEL_NAME, SandboxRole, SandboxState
from sandboxes.base import BoxLimits
from store import box_cap, forks, rollouts, sandboxes, sessions, tasks
from store.box_cap import MachineLoad
from store.box_failures import ENDED_BY_HOST
from store.sandboxes import LedgerRow, NewSandbox

_WAIT_FOR_ROOM_SECONDS = 60.0
_KEPT_SECONDS = 5.0


@dataclass(eq=False)
class BootActivities(BoxActivities):
    """Boot and release, with one line of waiting boots per role."""

    builds: ImageBuilds | None
    lateness: WorkerLateness

    def __post_init__(self) -> None:
        self._creator = BoxCreator(self.database, self.provider, self.builds)
        self._waiting_lines = {role: asyncio.Lock() for role in SandboxRole}
        self._held = ""
        self._held_until = 0.0

    @activity_stage("boot")
    async def boot(self, input: StageInput) -> LiveSandbox:
        """Return a live, unused box for this attempt and role; adopt the box of an earlier try if there is one.

        Raises SandboxFullError if no box is free within a minute or the image is being built, GuardSpentError if the
        rollout may have no further box.
        """
        config = await self.configs.of_rollout(input.rollout_id)
        max_ttl_seconds = self.provider.capabilities.max_ttl_seconds
        ttl_seconds = box_ttl_seconds(config, self.configs.settings, max_ttl_seconds)
        async with heartbeating():
            if await self._is_further_box(input):
                await require_wall_time(self.database, input, guard_seconds(config, self.configs.settings))
            new = await self._requested(input, config)
            self._creator.require_not_building(new.image)
            row = await self._reserve(input, new, config)
            if row.state == SandboxState.LIVE and row.provider_id is not None:
                return LiveSandbox(sandbox_id=row.id, provider_id=row.provider_id)
            opened = {*config.sandbox.network, *await self.database.read(tasks.open_roles, input.rollout_id)}
            started = time.monotonic()
            provider_id = await self._creator.create(
                row,
                new.image,
                ttl_seconds=ttl_seconds,
                network=network_of(input.role, opened),
                metadata={"ratchet_rollout": str(input.rollout_id)},
                limits=_limits(config.sandbox),
            )
            used_seconds = time.monotonic() - started
            return LiveSandbox(sandbox_id=row.id, provider_id=provider_id, used_seconds=used_seconds)

    async def _requested(self, input: StageInput, config: RunConfig) -> NewSandbox:
        """Open the attempt if this is an agent's box, and return the ledger row to be reserved."""
        info = activity.info()
        assert info.workflow_id is not None and info.workflow_run_id is not None
        async with self.database.begin() as connection:
            if input.role is SandboxRole.AGENT:
                await self._open_attempt(connection, input, info.workflow_run_id, config)
            image = await tasks.image_of_rollout(connection, input.rollout_id)
        return NewSandbox(
            provider=self.provider.name,
            role=input.role,
            rollout_id=input.rollout_id,
            attempt=input.attempt,
            workflow_id=info.workflow_id,
            image=image,
        )

    async def _is_further_box(self, input: StageInput) -> bool:
        """Return whether the guard decides on this box: another box of this role has failed.

        Boxes that complete a verdict are exempt: those of control runs, and the second box of a suspect patch.
        """
        if input.role is SandboxRole.AGENT:
            return input.attempt > 1
        if input.grade_id is not None or input.suspected:
            return False
        workflow_id = activity.info().workflow_id
        assert workflow_id is not None
        return await self.database.read(sandboxes.has_used_grading_box, input.rollout_id, workflow_id)

    async def _reserve(self, input: StageInput, new: NewSandbox, config: RunConfig) -> LedgerRow:
        """Return the row of an earlier try, or a new one as soon as a box is free.

        Waits here for a while, because a failed try of the activity costs more than a query. Only one boot per role
        queries the ledger and the others wait behind it, which makes three queries a second instead of fifty.
        """
        max_boots = self.configs.settings.queues["boot"].slots
        max_boxes = config.sandbox.max_boxes
        earlier_try = (input.rollout_id, input.attempt, input.role, new.workflow_id)
        row = await self.database.read(sandboxes.unused_sandbox, *earlier_try)
        if row is not None:
            return row
        try:
            async with asyncio.timeout(_WAIT_FOR_ROOM_SECONDS), self._waiting_lines[input.role]:
                while True:
                    async with self.database.begin() as connection:
                        row = await sandboxes.unused_sandbox(connection, *earlier_try)
                        if row is None and config.sandbox.adaptive and input.role is SandboxRole.AGENT:
                            run_id = await rollouts.run_of_rollout(connection, input.rollout_id)
                            memory = psutil.virtual_memory()  # in a local stack, the boxes use it, too
                            machine = MachineLoad(memory.available / memory.total, self.lateness.seconds())
                            max_boxes = await box_cap.adapt_cap(connection, run_id, config, new.provider, machine)
                        if row is None:
                            row = await sandboxes.reserve_sandbox(connection, new, max_boxes, max_boots)
                    if row is not None:
                        return row
                    await asyncio.sleep(random.uniform(0.2, 0.5))
        except TimeoutError:
            limit = (
                "sandbox.max_boxes" if max_boxes == config.sandbox.max_boxes else "sandbox.adaptive; `ratchet status`"
            )
            raise SandboxFullError(
                f"all {max_boxes} boxes ({limit}) are taken ({await self._holders(new.provider)}), or {max_boots} "
                "(queues.boot.slots) are booting; `ratchet admin sandboxes` lists them",
                retry_after_seconds=5,
            ) from None

    async def _holders(self, provider: str) -> str:
        """Say which runs hold boxes. Thousands of boots may ask at once, so the answer is kept for a while."""
        now = time.monotonic()
        if now > self._held_until:
            self._held_until = now + _KEPT_SECONDS
            holders = await self.database.run(sandboxes.box_holders, provider)
            self._held = ", ".join(f"{one.num_boxes} by {one.run_id or 'no run'}" for one in holders)
        return self._held or "none now"

    async def _open_attempt(
        self, connection: AsyncConnection, input: StageInput, owner: str, config: RunConfig
    ) -> None:
        """Create the attempt and its session; safe to repeat."""
        await rollouts.open_attempt(connection, input.rollout_id, input.attempt, owner)
        if input.attempt > 1:  # its turns are final, and the new attempt may ask for them again
            await sessions.close_session(connection, input.rollout_id, input.attempt - 1)
        await forks.give_recorded_turns(connection, input.rollout_id)
        temperature = await rollouts.temperature_of(connection, input.rollout_id)
        limits: sessions.SessionLimits = {
            "max_context_tokens": config.sampling.max_context_tokens,
            "max_response_tokens": config.sampling.max_response_tokens,
            "min_response_tokens": config.sampling.min_response_tokens,
            "max_turns": config.harness.max_turns,
        }
        await sessions.open_session(
            connection, input.rollout_id, input.attempt, temperature, MODEL_NAME, limits, config.endpoint
        )

    @activity_stage("release")
    async def release(self, input: StageInput) -> StageResult:
        """Kill all boxes that the rollout still holds."""
        async with self.database.begin() as connection:
            reason = ENDED_BY_HOST if input.ended_by_host else "rollout ended"
            rows = await sandboxes.want_release_of_rollout(connection, input.rollout_id, reason)
        await kill_and_record(self.database, self.provider, rows)
        return StageResult()


def _limits(config: SandboxConfig) -> BoxLimits:
    memory_bytes = None if config.memory_mib is None else config.memory_mib << 20
    return BoxLimits(memory_bytes=memory_bytes, num_cpus=config.cpus, max_processes=config.max_processes)
