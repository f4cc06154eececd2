"""Stage `grade`: the patch is applied in a second, fresh box and the hidden tests run there.

Why here: the agent cannot grade itself; nothing but the patch's text comes over from its box, and of that only what the rules let through.
Called by: the `Rollout` and `Regrade` workflows, once per box.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from activities.boot import try_kill_box
from activities.graders.base import Grader, Verdict
from activities.graders.integrity import Finding
from activities.graders.integrity_rules import RULES
from activities.grading_box import BoxPreparation
from activities.run_configs import RunConfigs
from activities.sandboxes.base import Sandbox, SandboxProvider
from activities.stage import activity_stage, heartbeating
from activities.workspace import stage_user
from ratchet.config import RunConfig
from ratchet.errors import BugError, GraderFailedError, RatchetError
from ratchet.payloads import GradeResult, StageInput
from ratchet.store import grades, rollouts, sandboxes, tasks
from ratchet.store.arrays import pack_text, unpack_bytes
from ratchet.store.database import Database
from ratchet.store.tasks import TaskRow

_LISTED_TEST = RULES[0].name
"""Left out whatever the run's policy is: honest work edits tests, too."""


class GradeActivities:
    def __init__(
        self, database: Database, provider: SandboxProvider, configs: RunConfigs, graders: Mapping[str, Grader]
    ) -> None:
        self.database, self.provider, self.configs, self.graders = database, provider, configs, graders

    @activity_stage("grade")
    async def grade(self, input: StageInput) -> GradeResult:
        """Stores a verdict and releases the box. Raises GraderFailedError where no verdict can be given."""
        assert input.sandbox_id is not None and input.patch_id is not None
        started = time.monotonic()
        config = await self.configs.of_rollout(input.rollout_id)
        async with heartbeating():
            async with self.database.begin() as connection:
                provider_id = await sandboxes.spend_sandbox(connection, input.sandbox_id, stage_user("grade"))
                task = await tasks.task_of_rollout(connection, input.rollout_id)
                patch = await rollouts.get_patch(connection, input.patch_id)
            grader = grader_of(self.graders, input.grader or task.grader)
            box = await self.provider.connect(provider_id)
            try:
                verdict, findings = await judge_patch(
                    box, grader, task, patch.base_commit, unpack_bytes(patch.diff), config
                )
            except RatchetError:
                await self._let_go(input.sandbox_id, provider_id)
                raise
            finally:
                await box.close()
            async with self.database.begin() as connection:
                row = verdict_row(input.rollout_id, input.patch_id, grader, verdict, findings)
                grade_id = await grades.store_grade(
                    connection, {**row, "sandbox_id": input.sandbox_id, "repeat": input.repeat}
                )
                await sandboxes.want_sandbox_release(connection, input.sandbox_id, "verdict stored")
            await try_kill_box(self.database, self.provider, input.sandbox_id, provider_id)
        used = time.monotonic() - started
        return GradeResult(grade_id=grade_id, solved=verdict.solved, rejected=verdict.rejected, used_seconds=used)

    async def _let_go(self, sandbox_id: int, provider_id: str) -> None:
        """A box that gave no verdict is spent: the next try's must find room, whoever else holds boxes."""
        async with self.database.begin() as connection:
            await sandboxes.want_sandbox_release(connection, sandbox_id, "no verdict")
        await try_kill_box(self.database, self.provider, sandbox_id, provider_id)


def grader_of(graders: Mapping[str, Grader], name: str) -> Grader:
    if name not in graders:
        raise BugError(f"no grader {name!r}; there are {', '.join(sorted(graders))}")
    return graders[name]


async def judge_patch(
    box: Sandbox, grader: Grader, task: TaskRow, base_commit: str | None, diff: bytes, config: RunConfig
) -> tuple[Verdict, list[Finding]]:
    """The verdict on `diff` in a fresh box, and what the rules found. `base_commit` None: whatever the box's base is."""
    preparation = BoxPreparation(box, task, config.limits.workspace_seconds)
    prepared = await preparation.run(grader.test_files(task.spec), base_commit, diff)
    findings = prepared.findings
    told = [finding for finding in findings if finding.rule != _LISTED_TEST]
    if config.grading.integrity == "reject" and told:
        names = ", ".join(sorted({f"{finding.rule} ({finding.path})" for finding in told}))
        return Verdict(
            False, f"the patch brings files that could change the runner: {names}", "", 0.0, True, told[0].rule
        ), findings
    if not prepared.applies:
        return Verdict(False, "the patch does not apply to its own base commit", prepared.log, 0.0), findings
    try:
        return await grader.grade(box, task.workdir, task.spec, config.limits.eval_seconds), findings
    except GraderFailedError as error:
        if prepared.may_have_broken_the_command:
            return Verdict(False, f"the patch took away what the tests need: {error}", "", 0.0), findings
        raise


def verdict_row(
    rollout_id: int | None, patch_id: int | None, grader: Grader, verdict: Verdict, findings: list[Finding]
) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id,
        "patch_id": patch_id,
        "grader": grader.name,
        "grader_version": grader.version,
        "solved": verdict.solved,
        "rejected": verdict.rejected,
        "rule": verdict.rule,
        "reason": verdict.reason,
        "tests": verdict.tests,
        "fail_to_pass": verdict.fail_to_pass,
        "pass_to_pass": verdict.pass_to_pass,
        "findings": [asdict(finding) for finding in findings],
        "log": pack_text(verdict.log),
        "duration_seconds": verdict.duration_seconds,
    }
