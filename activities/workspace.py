"""Stage `workspace`: the task's repository in the agent's box, with one base commit and nothing that helps to cheat.

Why here: what the agent starts from is recorded (the base commit), so that what it changed can be told and proven.
Called by: the `Rollout` workflow, once per box.
"""

import time

from temporalio import activity

from activities.git_scripts import prepare_script
from activities.grading_box import has_archive, upload_archive
from activities.run_configs import RunConfigs
from activities.sandboxes.base import CommandResult, SandboxProvider
from activities.stage import activity_stage, heartbeating
from ratchet.payloads import StageInput, StageResult
from ratchet.store import rollouts, sandboxes, tasks
from ratchet.store.arrays import pack_text
from ratchet.store.database import Database

_MAX_LOG_CHARACTERS = 200_000


def stage_user(name: str) -> str:
    """Who spends a box: one try of one stage of one workflow run."""
    info = activity.info()
    return f"{name}:{info.workflow_run_id}:{info.activity_id}:{info.attempt}"


def _log(result: CommandResult) -> str:
    """What the pre_commands printed; they write to the script's stderr."""
    return result.stderr[-_MAX_LOG_CHARACTERS:]


class WorkspaceActivities:
    def __init__(self, database: Database, provider: SandboxProvider, configs: RunConfigs) -> None:
        self.database, self.provider, self.configs = database, provider, configs

    @activity_stage("workspace")
    async def workspace(self, input: StageInput) -> StageResult:
        """Spends the box and records the base commit. Raises CommandFailedError where a pre_command fails."""
        assert input.sandbox_id is not None
        started = time.monotonic()
        config = await self.configs.of_rollout(input.rollout_id)
        async with heartbeating():
            async with self.database.begin() as connection:
                fence = await rollouts.take_fence(connection, input.rollout_id, input.attempt)
                provider_id = await sandboxes.spend_sandbox(connection, input.sandbox_id, stage_user("workspace"))
                task = await tasks.task_of_rollout(connection, input.rollout_id)
            box = await self.provider.connect(provider_id)
            try:
                await upload_archive(box, task)
                script = prepare_script(
                    task.workdir, task.spec["pre_commands"], task.spec["problem_statement"], archive=has_archive(task)
                )
                result = await box.exec(script, user="root", timeout=config.limits.workspace_seconds)
            finally:
                await box.close()
            base_commit = result.stdout.strip().splitlines()[-1]
            async with self.database.begin() as connection:
                values = {
                    "base_commit": base_commit,
                    "sandbox_id": input.sandbox_id,
                    "workspace_log": pack_text(_log(result)),
                }
                await rollouts.write_attempt(connection, input.rollout_id, input.attempt, fence, values)
        return StageResult(used_seconds=time.monotonic() - started)
