"""Stage `diff`: seal the agent's work, take its diff, release the box.

Sealing comes first: the agent's processes are ended and its session is closed, so that nothing it does afterwards can
reach the patch or the trajectory. The stage may run twice on one box.
"""

import base64
import binascii
import contextlib
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.box_lifecycle import connected_box, guard_seconds, try_kill_box
from activities.grade import grade_row
from activities.guard import require_wall_time
from activities.harnesses import launcher
from activities.harnesses.registry import Harnesses
from activities.stage import activity_stage, heartbeating
from activities.stage_context import BoxActivities, StageContext
from engine.client import EngineClient
from grading.base import Grader, Verdict
from grading.git_scripts import diff_script
from grading.judge_patch import JudgedPatch, find_grader
from grading.reward_file import HARBOR
from ratchet.errors import EngineRejectedError, EngineUnavailableError, FencedError, SandboxBusyError
from ratchet.payloads import DiffResult, StageInput
from sandboxes.base import Sandbox
from store import admissions, grades, rollouts, sandboxes, sessions
from store.arrays import pack_text
from store.rollouts import NewPatch
from store.tasks import TaskRow

_MARGIN_SECONDS = 30.0
"""The part of the stage's time limit that is left for what follows the diff."""
_PRINTED = re.compile(
    r"^(?P<files>\d+) (?P<bytes>\d+) (?P<digest>[0-9a-f]{64})\n(?P<body>too_large|[A-Za-z0-9+/]*={0,2})\n\Z",
    re.MULTILINE,
)


class CapturedDiff(NamedTuple):
    """The agent's changes. `reason`: why the diff was left out; empty if it was not."""

    diff: bytes
    num_files: int
    reason: str


@dataclass(eq=False)
class DiffActivities(BoxActivities):
    harnesses: Harnesses
    graders: Mapping[str, Grader]

    @activity_stage("diff")
    async def diff(self, input: StageInput) -> DiffResult:
        """End agent and session, store the patch, kill the box. GuardSpentError if the guard is spent with no patch."""
        started = time.monotonic()
        async with heartbeating():
            stored = await self._stored_patch(input)
            if stored is not None:
                return stored
            config = await self.configs.of_rollout(input.rollout_id)
            if activity.info().attempt > 1:  # the first try gets its time in any case
                await require_wall_time(self.database, input, guard_seconds(config, self.configs.settings))
            context = await self.database.run(StageContext.load_within, config, input)
            harness = self.harnesses[config.harness.name]
            async with connected_box(self.provider, context.provider_id) as box:
                await launcher.end_tree(box, input.attempt)
                await self._close_session(input)
                captured = await capture_diff(box, context.task.workdir, config.limits.max_patch_bytes, _diff_seconds())
                transcript = await harness.collect(box, input.attempt)
            async with self.database.begin() as connection:
                await context.write_attempt(connection, {"transcript": pack_text(transcript.data)})
                patch_id = await self._store_patch(connection, input, captured)
                grade_id = None
                if not captured.diff:
                    grade_id = await self._empty_verdict(connection, input, patch_id, context.task, captured.reason)
                await sandboxes.want_sandbox_release(connection, context.sandbox_id, "patch stored")
            await try_kill_box(self.database, self.provider, context.sandbox_id, context.provider_id)
        used = time.monotonic() - started
        return DiffResult(patch_id=patch_id, num_bytes=len(captured.diff), grade_id=grade_id, used_seconds=used)

    async def _stored_patch(self, input: StageInput) -> DiffResult | None:
        """Return the result of an earlier try that stored the patch and whose completion was lost."""
        async with self.database.begin() as connection:
            stored = await rollouts.patch_of_attempt(connection, input.rollout_id, input.attempt)
            if stored is None:
                return None
            given = await grades.first_grade_of_patch(connection, stored.id)
        return DiffResult(patch_id=stored.id, num_bytes=stored.num_bytes, grade_id=given.id if given else None)

    async def _store_patch(self, connection: AsyncConnection, input: StageInput, captured: CapturedDiff) -> int:
        attempt = await rollouts.get_attempt(connection, input.rollout_id, input.attempt)
        if attempt.base_commit is None:  # `workspace` has recorded it before the agent started
            raise FencedError(f"attempt {input.attempt} of rollout {input.rollout_id} has lost its base commit")
        patch = NewPatch(
            rollout_id=input.rollout_id,
            attempt=input.attempt,
            base_commit=attempt.base_commit,
            diff=pack_text(captured.diff),
            num_bytes=len(captured.diff),
            num_files=captured.num_files,
            reason=captured.reason,
        )
        return await rollouts.store_patch(connection, patch)

    async def _empty_verdict(
        self, connection: AsyncConnection, input: StageInput, patch_id: int, task: TaskRow, reason: str
    ) -> int | None:
        """Store the verdict `not solved` if the patch was left out for a `reason`, or the task's row or its admission
        shows that the unchanged code fails. Such a patch needs no grading box. Return the grade's id, None otherwise.
        """
        grader = find_grader(self.graders, task.grader)
        if not reason:
            if task.spec.get("empty_patch_fails"):
                said = "the task's row says (empty_patch_fails)"
            elif task.spec.get("verifier") == HARBOR:  # its reward file may give a fraction for the unchanged code
                return None
            elif await admissions.is_admitted(connection, task.id, grader.name, grader.version):
                said = "admission has shown"
            else:
                return None
            reason = f"the patch is empty, and {said} that nothing is solved without one"
        judged = JudgedPatch(Verdict(False, reason, "", 0.0), [], [])
        return await grades.store_grade(connection, grade_row(input.rollout_id, patch_id, grader, judged))

    async def _close_session(self, input: StageInput) -> None:
        calls = await self.database.run(sessions.close_session, input.rollout_id, input.attempt)
        for call in calls:
            # The turn is aborted in the store already; the engine is told only to save work.
            with contextlib.suppress(EngineUnavailableError, EngineRejectedError):
                async with EngineClient(call.engine_address) as engine:
                    await engine.abort([call.request_id])


def _diff_seconds() -> float:
    """Return the time for taking the diff: `stages.diff.start_to_close` of temporal.yaml without the margin."""
    limit = activity.info().start_to_close_timeout
    assert limit is not None, "every stage has a limit"
    return max(_MARGIN_SECONDS, limit.total_seconds() - _MARGIN_SECONDS)


async def capture_diff(box: Sandbox, workdir: str, max_bytes: int, seconds: float) -> CapturedDiff:
    result = await box.exec(diff_script(workdir, max_bytes), user="root", timeout=seconds)
    return parse_diff(result.stdout, max_bytes)


def parse_diff(printed: str, max_bytes: int) -> CapturedDiff:
    """Parse `diff_script`'s output. SandboxBusyError if it is cut off; the service may report success then."""
    found = _PRINTED.search(printed)
    if found is None:
        raise SandboxBusyError(f"the diff has not arrived whole: its {len(printed)} characters have no end")
    num_files = int(found["files"])
    num_bytes = int(found["bytes"])
    if found["body"] == "too_large":
        reason = f"the diff of {num_bytes} bytes is above limits.max_patch_bytes ({max_bytes}) and was left out"
        return CapturedDiff(b"", 0, reason)
    try:
        diff = base64.b64decode(found["body"], validate=True)
    except binascii.Error as error:
        raise SandboxBusyError(f"the diff has not arrived whole: {error}") from error
    if (len(diff), hashlib.sha256(diff).hexdigest()) != (num_bytes, found["digest"]):
        raise SandboxBusyError(f"the diff has not arrived whole: {len(diff)} bytes came of {num_bytes}, or others")
    if num_files > 0 and not diff:
        raise SandboxBusyError(f"the diff has not arrived whole: it is empty, but {num_files} files have changed")
    return CapturedDiff(diff, num_files, "")
