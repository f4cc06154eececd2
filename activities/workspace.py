"""Stage `workspace`: prepare the repository in the agent's box, with one base commit that `diff` compares with."""

import time

from activities.box_lifecycle import connected_box
from activities.running_commands import RunningPreCommand
from activities.stage import activity_stage, heartbeating
from activities.stage_context import BoxActivities, StageContext
from grading.git_scripts import FAILED_PRE_COMMAND, PRE_COMMAND_BEGINS, prepare_script
from grading.grading_box import close_network, upload_archive
from ratchet.errors import CommandFailedError
from ratchet.payloads import StageInput, StageResult
from ratchet.types import SandboxRole
from store.arrays import pack_text

_MAX_LOG_CHARACTERS = 200_000


class WorkspaceActivities(BoxActivities):
    """The workspace stage; it may run once per box."""

    @activity_stage("workspace")
    async def workspace(self, input: StageInput) -> StageResult:
        """Prepare the repository and record the base commit. Raises CommandFailedError if a pre_command fails."""
        started = time.monotonic()
        running = RunningPreCommand()
        async with heartbeating(running.told):
            context = await StageContext.load(self.database, self.configs, input, use_box_as="workspace")
            task = context.task
            running.pre_commands = task.spec["pre_commands"]
            async with connected_box(self.provider, context.provider_id) as box:
                archive = await upload_archive(box, task.spec)
                script = prepare_script(
                    task.workdir,
                    task.spec["pre_commands"],
                    task.spec["problem_statement"],
                    archive=archive,
                    user=context.agent_user,
                )
                try:
                    seconds = context.config.limits.workspace_seconds
                    result = await box.exec(script, user="root", timeout=seconds, on_stderr=running.read)
                except CommandFailedError as error:
                    raise of_pre_command(error, task.spec["pre_commands"]) from error
                await close_network(box, task.opened, SandboxRole.AGENT)
            log = result.stderr[-_MAX_LOG_CHARACTERS:]  # the script sends the output of pre_commands there
            async with self.database.begin() as connection:
                await context.write_attempt(
                    connection,
                    {
                        "base_commit": result.stdout.strip().splitlines()[-1],
                        "sandbox_id": context.sandbox_id,
                        "workspace_log": pack_text(log),
                    },
                )
        return StageResult(used_seconds=time.monotonic() - started)


def of_pre_command(error: CommandFailedError, pre_commands: list[str]) -> CommandFailedError:
    """Return the error with the task's own command in place of the script around it, if that is what failed."""
    found = FAILED_PRE_COMMAND.search(error.stderr)
    if found is None:
        return error
    said = PRE_COMMAND_BEGINS.split(error.stderr[: found.start()])[-1].lstrip("\n")
    return CommandFailedError(pre_commands[int(found[1])], error.exit_code, error.stdout, said, error.timed_out)
