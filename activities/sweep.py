"""Activity `sweep`: start runs again, end rollouts and kill boxes that no running workflow owns; prune old runs
and index the words of conversations.

A box is killed if its row is marked for release, or if the workflow of its row is closed or missing. A box that the
provider lists under this installation, but whose ledger row is released or missing, is killed after a grace. Boxes of
other installations are spared, also if the ledger is a copy that has rows of them (`kill_own_box`). Whether a workflow
runs is asked by DescribeWorkflowExecution, because Temporal's visibility lags.
"""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.service import RPCError

from activities.box_lifecycle import INSTALLATION_KEY, UUID_KEY, kill_own_box, release_box
from activities.pruning import Pruned, due_tasks, prune_run
from activities.stage import activity_stage, heartbeating
from ratchet import temporal_client
from ratchet.errors import ConfigError, RatchetError
from ratchet.sweep_payloads import SweepInput, SweepResult
from ratchet.temporal_client import WorkflowState
from ratchet.temporal_settings import TemporalSettings
from ratchet.types import Outcome, RunState, SandboxState
from sandboxes.base import SandboxProvider
from store import groups, installations, open_runs, rollout_words, rollouts, runs, sandboxes
from store.database import Database
from store.rollouts import OutcomeValues
from store.sandboxes import LedgerRow

_LOG = structlog.get_logger()

_CONCURRENT_KILLS = 8
_MAX_RESTARTS = 5


@dataclass(frozen=True, slots=True)
class _SweptBox:
    """A box to kill. `row` None: the ledger has no unreleased row for it. `provider_id` None: it was never created.

    `requested`: its row is marked for release. `reason`: one line for the report.
    """

    row: LedgerRow | None
    provider_id: str | None
    requested: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Findings:
    """Boxes to kill, and how many boxes of this installation exist."""

    boxes: list[_SweptBox]
    num_boxes: int


@dataclass(frozen=True, slots=True)
class _EndedRollouts:
    num_rollouts: int
    num_sessions: int


@dataclass
class SweepActivities:
    database: Database
    provider: SandboxProvider
    settings: TemporalSettings
    client: Client

    @activity_stage("sweep")
    async def sweep(self, input: SweepInput) -> SweepResult:
        """Restart runs and end rollouts without a workflow, then kill boxes; a dry run only reports."""
        async with heartbeating():
            if not input.dry_run:
                await self._reset_contradicted()
            num_runs = await self._restart_runs(input.dry_run)
            ended = await self._end_orphaned_rollouts(input.dry_run)
            found = self._limited(await self._find_boxes(), input.force)
            done = found if input.dry_run else await self._kill_all(found)
            pruned = [] if input.dry_run else await self._prune()
            num_indexed = 0 if input.dry_run else await self._index_words()
        if done or ended.num_rollouts:
            _LOG.info(
                "swept",
                boxes=len(done),
                failed=len(found) - len(done),
                rollouts=ended.num_rollouts,
                dry_run=input.dry_run,
            )
        return SweepResult(
            boxes_released=sum(box.row is not None for box in done),
            boxes_unknown=sum(box.row is None for box in done),
            sessions_closed=ended.num_sessions,
            rollouts_ended=ended.num_rollouts,
            runs_restarted=num_runs,
            boxes=tuple(box.reason for box in done),
            rollouts_archived=sum(one.num_rollouts for one in pruned),
            directories_deleted=sum(one.num_directories for one in pruned),
            rollouts_indexed=num_indexed,
        )

    async def _prune(self) -> list[Pruned]:
        """Prune old runs for `retention.seconds_per_sweep`; what fails or is left is tried by the next sweep."""
        numbers = self.settings.retention
        end = time.monotonic() + numbers.seconds_per_sweep
        pruned = []
        try:
            for task in await due_tasks(self.database, numbers):
                try:
                    pruned.append(await prune_run(self.database, task, max_seconds=end - time.monotonic()))
                except ConfigError as error:
                    _LOG.info("run is not pruned", run=task.run_id, reason=str(error))
        except (OSError, RatchetError) as error:
            _LOG.error("runs are not pruned", reason=str(error))
        return pruned

    async def _index_words(self) -> int:
        """Index conversations for `sweep.index_seconds`; what fails or is left is tried by the next sweep."""
        try:
            return await rollout_words.index_rollouts(self.database, self.settings.sweep.index_seconds)
        except RatchetError as error:
            _LOG.error("conversations are not indexed", reason=str(error))
            return 0

    async def _find_boxes(self) -> _Findings:
        """Find rows without a running workflow, and boxes without an unreleased row.

        The provider is asked before the ledger: a box has its row before it exists, so a box that is created meanwhile
        is not taken for an unknown one.
        """
        own_ids = (await self.database.run(installations.installation)).own_ids
        listed = [info for own_id in own_ids for info in await self.provider.list({INSTALLATION_KEY: own_id})]
        async with self.database.begin() as connection:
            rows = await sandboxes.list_unreleased(connection, self.provider.name)
            old = await sandboxes.stale_creating_ids(connection, self.provider.name, self.settings.sweep.creating_grace)
        alive = await temporal_client.open_workflows(self.client, {row.workflow_id for row in rows})
        by_uuid = {info.metadata.get(UUID_KEY): info.id for info in listed}
        ids = {None, *(info.id for info in listed)}
        found = []
        for row in rows:
            # If the worker died between the create call and storing the id, the box is found by the row's uuid.
            box_id = row.provider_id or by_uuid.get(str(row.uuid))
            name = f"box {row.id} ({box_id}{'' if box_id in ids else ', which is not listed as one of ours'})"
            if row.state == SandboxState.RELEASE_WANTED:
                reason = f"{name}: its release is wanted"
                found.append(_SweptBox(row, box_id, requested=True, reason=reason))
            elif row.workflow_id not in alive and (row.state == SandboxState.LIVE or row.id in old):
                reason = f"{name}: {row.workflow_id} does not run"
                found.append(_SweptBox(row, box_id, requested=False, reason=reason))
        known = {str(row.uuid) for row in rows}
        before = datetime.now(UTC) - timedelta(seconds=self.settings.sweep.unknown_grace)
        unknown = [info.id for info in listed if info.metadata.get(UUID_KEY) not in known and info.started_at < before]
        reason = "of this installation, and released or missing in the ledger"
        found += [_SweptBox(None, box_id, requested=False, reason=f"{box_id}: {reason}") for box_id in unknown]
        return _Findings(found, len(rows) + len(unknown))

    def _limited(self, found: _Findings, force: bool) -> list[_SweptBox]:
        """Return all boxes with a requested release and at most `sweep.max_share` of the rest; all boxes if `force`."""
        if force:
            return found.boxes
        requested = [box for box in found.boxes if box.requested]
        rest = [box for box in found.boxes if not box.requested]
        return requested + rest[: max(1, int(self.settings.sweep.max_share * found.num_boxes))]

    async def _kill_all(self, boxes: list[_SweptBox]) -> list[_SweptBox]:
        """Kill the boxes, some at a time, and return those that are dead."""
        limit = asyncio.Semaphore(_CONCURRENT_KILLS)

        async def kill(box: _SweptBox) -> bool:
            async with limit:
                return await self._kill(box)

        killed = await asyncio.gather(*(kill(box) for box in boxes))
        return [box for box, is_dead in zip(boxes, killed, strict=True) if is_dead]

    async def _kill(self, box: _SweptBox) -> bool:
        """Kill one box; if the service is busy, return False and leave it marked for the next sweep."""
        if box.row is not None:
            await self.database.run(sandboxes.want_sandbox_release, box.row.id, "sweep")
            is_over = await release_box(self.database, self.provider, box.row.id, box.provider_id)
        else:
            assert box.provider_id is not None, "it was listed"
            end = await kill_own_box(self.database, self.provider, box.provider_id)
            is_over = end.is_over and not end.left_to
        activity.heartbeat()
        return is_over

    async def _reset_contradicted(self) -> None:
        """Let workflows begin anew that no worker can go on with, as after a restore of Temporal; the store has what
        they have done. What fails is tried by the next sweep."""
        try:
            if found := await temporal_client.reset_contradicted(self.client, self.settings.own("control")):
                _LOG.warning("workflows begin anew from the store", workflows=found)
        except RPCError as error:
            _LOG.warning("workflows are not looked at", reason=temporal_client.one_line(error))

    async def _restart_runs(self, dry_run: bool) -> int:
        """Start the workflow of every running run that has none; return their number.

        A workflow that was terminated by hand pauses its run, and so does one that fails again and again. A run whose
        workflow was cancelled before it could begin is cancelled.
        """
        async with self.database.begin() as connection:
            running = await open_runs.unfinished_runs(connection, running=True)
        states = await temporal_client.workflow_states(self.client, {f"run/{run_id}" for run_id in running})
        found = {run_id: states[f"run/{run_id}"] for run_id in running}
        closed = [run_id for run_id, state in found.items() if state is None or not state.is_open]
        for run_id in [] if dry_run else closed:
            if found[run_id] is WorkflowState.CANCELED:
                await self._cancel_run(run_id)
                continue
            if found[run_id] is WorkflowState.TERMINATED:
                reason = "its workflow was terminated"
            else:
                count = await self.database.run(runs.count_restart, run_id)
                reason = await self._failure(run_id) if count > _MAX_RESTARTS else ""
            if reason:
                await self.database.run(open_runs.pause_run, run_id, reason)
            else:
                await temporal_client.start_train_run(self.client, self.settings, run_id)
            _LOG.warning("run without a workflow", run=run_id, paused=reason)
        return len(closed)

    async def _cancel_run(self, run_id: str) -> None:
        async with self.database.begin() as connection:
            await runs.end_run(connection, run_id, RunState.CANCELLED, "its workflow was cancelled")
            await groups.cancel_unstarted_groups(connection, run_id)
            left = await runs.open_groups(connection, run_id)
        for group in left:
            try:
                await self.client.get_workflow_handle(group.workflow_id).cancel()
            except RPCError as error:
                _LOG.info("group has no workflow to cancel", group=group.workflow_id, reason=str(error))

    async def _failure(self, run_id: str) -> str:
        """Return why a run is paused whose workflow was started again too often."""
        try:
            await self.client.get_workflow_handle(f"run/{run_id}").result()
            last = "it completed although the run is not done"
        except (WorkflowFailureError, RPCError) as error:
            last = temporal_client.root_cause(error)
        return f"its workflow has ended {_MAX_RESTARTS} times within an hour: {last}"

    async def _end_orphaned_rollouts(self, dry_run: bool) -> _EndedRollouts:
        """Give rollouts whose workflow is closed or missing the outcome `infra_failed`."""
        num_sessions = 0
        claimed = await self.database.run(rollouts.claimed_and_open)
        alive = await temporal_client.open_workflows(self.client, {one.workflow_id for one in claimed})
        orphaned = [one for one in claimed if one.workflow_id not in alive]
        for one in [] if dry_run else orphaned:
            async with self.database.begin() as connection:
                facts = await rollouts.lock_rollout(connection, one.id)
                if facts.outcome is None and facts.owner == one.owner:  # not claimed again in the meantime
                    num_sessions += await rollouts.close_sessions(connection, one.id)
                    values: OutcomeValues = {
                        "outcome": Outcome.INFRA_FAILED,
                        "outcome_reason": "workflow_terminated",
                        "agent_exit": facts.agent_exit,
                    }
                    await rollouts.set_outcome(connection, one.id, values)
            if one.group_id is not None:
                await self._settle_if_orphaned(one.group_id)
            activity.heartbeat()
        return _EndedRollouts(len(orphaned), num_sessions)

    async def _settle_if_orphaned(self, group_id: int) -> None:
        """Settle a group whose own workflow does not run either, since no member will be replaced; wake its run."""
        group = await self.database.run(groups.get_group, group_id)
        if not await temporal_client.open_workflows(self.client, {group.workflow_id}):
            async with self.database.begin() as connection:
                await groups.settle_group(connection, group_id, accept_failed=True)
            try:
                await self.client.get_workflow_handle(f"run/{group.run_id}").signal("wake")
            except RPCError as error:
                _LOG.info("run has no workflow to wake", run=group.run_id, reason=str(error))
