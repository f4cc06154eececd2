"""Stage `capture diff`: seals the agent's work, takes the diff, lets the box go.

Why here: sealing comes first, so that nothing the agent does later can reach the patch or the trajectory.
Called by: the `Rollout` workflow. May run twice on one box.
"""

import base64
import contextlib
import time
from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.boot import try_kill_box
from activities.git_scripts import diff_script
from activities.grade import grader_of, verdict_row
from activities.graders.base import Grader, Verdict
from activities.harnesses.registry import Harnesses
from activities.run_configs import RunConfigs
from activities.sandboxes.base import Sandbox, SandboxProvider
from activities.stage import activity_stage, heartbeating
from engine.client import EngineClient
from ratchet.errors import EngineRejectedError, EngineUnavailableError
from ratchet.payloads import DiffResult, StageInput
from ratchet.store import admissions, grades, rollouts, sandboxes, sessions, tasks
from ratchet.store.arrays import pack_text
from ratchet.store.database import Database
from ratchet.store.tasks import TaskRow


class DiffActivities:
    def __init__(
        self,
        database: Database,
        provider: SandboxProvider,
        configs: RunConfigs,
        harnesses: Harnesses,
        graders: Mapping[str, Grader],
    ) -> None:
        self.database, self.provider, self.configs, self.harnesses, self.graders = (
            database,
            provider,
            configs,
            harnesses,
            graders,
        )

    @activity_stage("diff")
    async def diff(self, input: StageInput) -> DiffResult:
        """Ends the agent's process tree and verifies it, closes the session, stores the patch, releases the box."""
        assert input.sandbox_id is not None
        started = time.monotonic()
        config = await self.configs.of_rollout(input.rollout_id)
        async with heartbeating():
            async with self.database.begin() as connection:
                stored = await rollouts.patch_of_attempt(connection, input.rollout_id, input.attempt)
                if stored is not None:  # an earlier try got this far and its completion was lost
                    given = await grades.first_grade_of_patch(connection, stored.id)
                    return DiffResult(
                        patch_id=stored.id, num_bytes=stored.num_bytes, grade_id=given.id if given else None
                    )
                fence = await rollouts.take_fence(connection, input.rollout_id, input.attempt)
                provider_id = await sandboxes.provider_id(connection, input.sandbox_id)
                task = await tasks.task_of_rollout(connection, input.rollout_id)
                attempt = await rollouts.get_attempt(connection, input.rollout_id, input.attempt)
            box = await self.provider.connect(provider_id)
            try:
                harness = self.harnesses[config.harness.name]
                await harness.end(box, input.attempt)
                await self._close_session(input)
                num_files, diff, reason = await self._take(box, task.workdir, config.limits.max_patch_bytes)
                transcript = await harness.collect(box, input.attempt)
            finally:
                await box.close()
            assert attempt.base_commit is not None, "workspace records the base commit before the agent starts"
            async with self.database.begin() as connection:
                values = {"transcript": pack_text(transcript.data)}
                await rollouts.write_attempt(connection, input.rollout_id, input.attempt, fence, values)
                patch_id = await rollouts.store_patch(
                    connection,
                    {
                        "rollout_id": input.rollout_id,
                        "attempt": input.attempt,
                        "base_commit": attempt.base_commit,
                        "diff": pack_text(diff),
                        "num_bytes": len(diff),
                        "num_files": num_files,
                        "reason": reason,
                    },
                )
                grade_id = (
                    None if diff else await self._empty_verdict(connection, input.rollout_id, patch_id, task, reason)
                )
                await sandboxes.want_sandbox_release(connection, input.sandbox_id, "patch stored")
            await try_kill_box(self.database, self.provider, input.sandbox_id, provider_id)
        return DiffResult(
            patch_id=patch_id, num_bytes=len(diff), grade_id=grade_id, used_seconds=time.monotonic() - started
        )

    async def _empty_verdict(
        self, connection: AsyncConnection, rollout_id: int, patch_id: int, task: TaskRow, reason: str
    ) -> int | None:
        """Row or admission say that the unchanged repository fails; a box to see it again would be wasted. None: nobody has said so."""
        grader = grader_of(self.graders, task.grader)
        if task.spec.get("empty_patch_fails"):
            said = "the task's row says (empty_patch_fails)"
        elif await admissions.is_admitted(connection, task.id, grader.name, grader.version):
            said = "admission has shown"
        else:
            return None
        verdict = Verdict(
            False, reason or f"the patch is empty, and {said} that nothing is solved without one", "", 0.0
        )
        return await grades.store_grade(connection, verdict_row(rollout_id, patch_id, grader, verdict, []))

    async def _close_session(self, input: StageInput) -> None:
        async with self.database.begin() as connection:
            calls = await sessions.close_session(connection, input.rollout_id, input.attempt)
        for address, request_id in calls:
            # The turn is aborted already; telling the engine only saves it work.
            with contextlib.suppress(EngineUnavailableError, EngineRejectedError):
                async with EngineClient(address) as engine:
                    await engine.abort([request_id])

    async def _take(self, box: Sandbox, workdir: str, max_bytes: int) -> tuple[int, bytes, str]:
        """(changed files, diff, reason why it was left out)."""
        result = await box.exec(diff_script(workdir, max_bytes), user="root", timeout=150)
        count, _, body = result.stdout.partition("\n")
        if body.startswith("too_large"):
            return (
                0,
                b"",
                f"the diff of {body.split()[1]} bytes is above limits.max_patch_bytes ({max_bytes}) and was left out",
            )
        return int(count), base64.b64decode(body), ""
