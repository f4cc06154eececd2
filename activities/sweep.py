"""Stage `sweep`: what no living workflow owns is released, closed or ended. It touches no box of another installation.

Why here: the ledger and Temporal together say who is alive; neither alone does.
Called by: the `Sweep` workflow.

A box is released when its row wants it, or its owner's workflow is closed or missing. A box that the provider lists under our
installation but the ledger calls released or does not know is killed after a grace. An owner is alive if DescribeWorkflowExecution
says so: visibility lags.
"""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import structlog
from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.boot import INSTALLATION_KEY, UUID_KEY
from activities.sandboxes.base import SandboxProvider
from activities.stage import activity_stage, heartbeating
from ratchet.errors import SandboxBusyError
from ratchet.payloads import SweepInput, SweepResult
from ratchet.store import groups, rollouts, sandboxes
from ratchet.store.database import Database
from ratchet.store.sandboxes import LedgerRow
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import Outcome, SandboxState

_LOG = structlog.get_logger()

_DESCRIBES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class _Doomed:
    """A box to end. `row` None: the ledger has no live row for it. `provider_id` None: it never came to be."""

    row: LedgerRow | None
    provider_id: str | None
    asked: bool
    words: str


class SweepActivities:
    def __init__(
        self,
        database: Database,
        provider: SandboxProvider,
        settings: TemporalSettings,
        client: Client,
        installation: UUID,
    ) -> None:
        self.database, self.provider, self.settings, self.client, self.installation = (
            database,
            provider,
            settings,
            client,
            installation,
        )

    @activity_stage("sweep")
    async def sweep(self, input: SweepInput) -> SweepResult:
        async with heartbeating():
            ended, sessions_closed = await self._end_orphaned_rollouts(input.dry_run)
            doomed = self._limited(*await self._doomed(), input.force)
            done = doomed if input.dry_run else [box for box in doomed if await self._end(box)]
        if done or ended:
            _LOG.info("swept", boxes=len(done), failed=len(doomed) - len(done), rollouts=ended, dry_run=input.dry_run)
        return SweepResult(
            boxes_released=sum(box.row is not None for box in done),
            boxes_unknown=sum(box.row is None for box in done),
            sessions_closed=sessions_closed,
            rollouts_ended=ended,
            boxes=tuple(box.words for box in done),
        )

    async def _doomed(self) -> tuple[list[_Doomed], int]:
        """Rows that nobody needs, with their boxes, and boxes of ours that no live row accounts for; and how many boxes we hold.

        The provider is asked first: whatever it lists had its row before, so a box that is being made now is never a stranger.
        """
        listed = await self.provider.list({INSTALLATION_KEY: str(self.installation)})
        async with self.database.begin() as connection:
            rows = await sandboxes.list_unreleased(connection, self.provider.name)
            old = await sandboxes.stale_creating_ids(connection, self.provider.name, self.settings.sweep.creating_grace)
        alive = await self._alive({row.workflow_id for row in rows})
        by_uuid = {info.metadata.get(UUID_KEY): info.id for info in listed}
        doomed = []
        for row in rows:
            # A create whose worker died before it could write the id down is found by the row's own mark.
            box_id = row.provider_id or by_uuid.get(str(row.uuid))
            if row.state == SandboxState.RELEASE_WANTED:
                doomed.append(_Doomed(row, box_id, asked=True, words=f"box {row.id} ({box_id}): its release is wanted"))
            elif not alive[row.workflow_id] and (row.state == SandboxState.LIVE or row.id in old):
                doomed.append(
                    _Doomed(row, box_id, asked=False, words=f"box {row.id} ({box_id}): {row.workflow_id} does not run")
                )
        known = {str(row.uuid) for row in rows}
        before = datetime.now(UTC) - timedelta(seconds=self.settings.sweep.unknown_grace)
        strangers = [
            info.id for info in listed if info.metadata.get(UUID_KEY) not in known and info.started_at < before
        ]
        doomed += [
            _Doomed(None, box_id, asked=False, words=f"{box_id}: ours, and released or unknown in the ledger")
            for box_id in strangers
        ]
        return doomed, len(rows) + len(strangers)

    def _limited(self, doomed: list[_Doomed], num_boxes: int, force: bool) -> list[_Doomed]:
        """Rows that ask for their release go first and all; of the rest at most a share of our boxes per pass, so that a wrong belief
        about who is alive cannot take everything at once."""
        if force:
            return doomed
        asked = [box for box in doomed if box.asked]
        rest = [box for box in doomed if not box.asked]
        return asked + rest[: max(1, int(self.settings.sweep.max_share * num_boxes))]

    async def _end(self, box: _Doomed) -> bool:
        """One that cannot be killed now stays marked for the next pass, and keeps no other from its end."""
        if box.row is not None:
            async with self.database.begin() as connection:
                await sandboxes.want_sandbox_release(connection, box.row.id, "sweep")
        try:
            if box.provider_id is not None:
                await self.provider.kill(box.provider_id)
        except SandboxBusyError as error:
            _LOG.warning("box not swept", box=box.words, reason=str(error))
            return False
        if box.row is not None:
            async with self.database.begin() as connection:
                await sandboxes.mark_released(connection, [box.row.id])
        activity.heartbeat()
        return True

    async def _alive(self, workflow_ids: set[str]) -> dict[str, bool]:
        limit = asyncio.Semaphore(_DESCRIBES_AT_ONCE)

        async def alive(workflow_id: str) -> bool:
            async with limit:
                try:
                    description = await self.client.get_workflow_handle(workflow_id).describe()
                except RPCError as error:
                    if error.status is RPCStatusCode.NOT_FOUND:
                        return False
                    raise
                return description.status is WorkflowExecutionStatus.RUNNING

        ordered = sorted(workflow_ids)
        return dict(zip(ordered, await asyncio.gather(*(alive(workflow_id) for workflow_id in ordered)), strict=True))

    async def _end_orphaned_rollouts(self, dry_run: bool) -> tuple[int, int]:
        """Rollouts that were claimed by a workflow which is closed or missing get their outcome: `infra_failed`.

        Returns the numbers of rollouts ended and sessions closed.
        """
        sessions_closed = 0
        async with self.database.begin() as connection:
            claimed = await rollouts.claimed_and_open(connection)
        alive = await self._alive({one.workflow_id for one in claimed})
        orphaned = [one for one in claimed if not alive[one.workflow_id]]
        for one in [] if dry_run else orphaned:
            async with self.database.begin() as connection:
                facts = await rollouts.lock_rollout(connection, one.id)
                if facts.outcome is None and facts.owner == one.owner:  # not taken up again while we asked
                    sessions_closed += await rollouts.close_sessions(connection, one.id)
                    values = {
                        "outcome": Outcome.INFRA_FAILED,
                        "outcome_reason": "workflow_terminated",
                        "agent_exit": facts.agent_exit,
                    }
                    await rollouts.set_outcome(connection, one.id, values)
            if one.group_id is not None:
                await self._settle_if_orphaned(one.group_id)
            activity.heartbeat()
        return len(orphaned), sessions_closed

    async def _settle_if_orphaned(self, group_id: int) -> None:
        """A group whose own workflow is gone, too, has nobody left to replace its members."""
        async with self.database.begin() as connection:
            workflow_id, run_id = await groups.workflow_of_group(connection, group_id)
        if not (await self._alive({workflow_id}))[workflow_id]:
            async with self.database.begin() as connection:
                await groups.settle_group(connection, group_id, accept_failed=True)
            try:
                await self.client.get_workflow_handle(f"run/{run_id}").signal("wake")
            except RPCError as error:
                _LOG.info("run is not there to be woken", run=run_id, reason=str(error))
