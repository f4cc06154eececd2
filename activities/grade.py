"""Stage `grade`: apply the patch in a second, fresh box and run the hidden tests there.

Only the text of the patch comes from the agent's box, and only the files of it that the integrity rules let through.
Admission judges its patches by the same `judge_patch`.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple, Self

from activities.box_lifecycle import connected_box, try_kill_box
from activities.graders.base import Grader, Verdict
from activities.graders.integrity_rules import RULES
from activities.graders.patch_screening import Finding
from activities.grading_box import BoxPreparation
from activities.run_configs import RunConfigs
from activities.sandboxes.base import Sandbox, SandboxProvider
from activities.stage import activity_stage, heartbeating
from activities.stage_context import StageContext
from ratchet.config import RunConfig
from ratchet.errors import BugError, GraderFailedError, RatchetError
from ratchet.payloads import GradeResult, StageInput
from ratchet.store import grades, rollouts, sandboxes
from ratchet.store.arrays import pack_text, unpack_bytes
from ratchet.store.database import Database
from ratchet.store.grades import NewGrade
from ratchet.store.tasks import TaskRow

_LISTED_TEST = RULES[0].name
"""The rule whose files are left out under either policy, because honest patches edit tests, too."""


@dataclass(frozen=True, slots=True)
class GradingLimits:
    """Time limits of one grade in seconds, and what happens to a patch with files that could change the runner."""

    eval_seconds: float
    workspace_seconds: float
    integrity: Literal["drop", "reject"] = "drop"

    @classmethod
    def of_run(cls, config: RunConfig) -> Self:
        """Take the limits from a run's config."""
        return cls(config.limits.eval_seconds, config.limits.workspace_seconds, config.grading.integrity)


class JudgedPatch(NamedTuple):
    """A verdict, and the files of the patch that integrity rules named."""

    verdict: Verdict
    findings: list[Finding]


class GradeActivities:
    """The grade stage; it may run once per box."""

    def __init__(
        self, database: Database, provider: SandboxProvider, configs: RunConfigs, graders: Mapping[str, Grader]
    ) -> None:
        self.database = database
        self.provider = provider
        self.configs = configs
        self.graders = graders

    @activity_stage("grade")
    async def grade(self, input: StageInput) -> GradeResult:
        """Store a verdict and kill the box. Raises GraderFailedError if no verdict can be given."""
        assert input.patch_id is not None
        started = time.monotonic()
        async with heartbeating():
            context = await StageContext.load(self.database, self.configs, input, use_box_as="grade", fenced=False)
            async with self.database.begin() as connection:
                patch = await rollouts.get_patch(connection, input.patch_id)
            grader = find_grader(self.graders, input.grader or context.task.grader)
            limits = GradingLimits.of_run(context.config)
            diff = unpack_bytes(patch.diff)
            try:
                async with connected_box(self.provider, context.provider_id) as box:
                    judged = await judge_patch(box, grader, context.task, patch.base_commit, diff, limits)
            except RatchetError:
                await self._release_without_verdict(context)
                raise
            verdict = judged.verdict
            row = grade_row(input.rollout_id, input.patch_id, grader, verdict, judged.findings)
            async with self.database.begin() as connection:
                grade_id = await grades.store_grade(
                    connection, replace(row, sandbox_id=context.sandbox_id, repeat=input.repeat)
                )
                await sandboxes.want_sandbox_release(connection, context.sandbox_id, "verdict stored")
            await try_kill_box(self.database, self.provider, context.sandbox_id, context.provider_id)
        used = time.monotonic() - started
        return GradeResult(grade_id=grade_id, solved=verdict.solved, rejected=verdict.rejected, used_seconds=used)

    async def _release_without_verdict(self, context: StageContext) -> None:
        """Release a box that gave no verdict, so that the next try finds a free one."""
        async with self.database.begin() as connection:
            await sandboxes.want_sandbox_release(connection, context.sandbox_id, "no verdict")
        await try_kill_box(self.database, self.provider, context.sandbox_id, context.provider_id)


def find_grader(graders: Mapping[str, Grader], name: str) -> Grader:
    """Return the grader of this name. Raises BugError if there is none."""
    if name not in graders:
        raise BugError(f"no grader {name!r}; there are {', '.join(sorted(graders))}")
    return graders[name]


async def judge_patch(
    box: Sandbox, grader: Grader, task: TaskRow, base_commit: str | None, diff: bytes, limits: GradingLimits
) -> JudgedPatch:
    """Judge `diff` in a fresh box. `base_commit` None: any base commit is accepted.

    Raises GraderFailedError if the grader cannot run for a reason that is not the patch's, and the box's own errors.
    """
    preparation = BoxPreparation(box, task, limits.workspace_seconds)
    prepared = await preparation.run(grader.test_files(task.spec), base_commit, diff)
    findings = prepared.findings
    runner_findings = [finding for finding in findings if finding.rule != _LISTED_TEST]
    if limits.integrity == "reject" and runner_findings:
        names = ", ".join(sorted({f"{finding.rule} ({finding.path})" for finding in runner_findings}))
        reason = f"the patch brings files that could change the runner: {names}"
        verdict = Verdict(False, reason, "", 0.0, rejected=True, rule=runner_findings[0].rule)
    elif not prepared.applies:
        verdict = Verdict(False, "the patch does not apply to its own base commit", prepared.log, 0.0)
    else:
        try:
            verdict = await grader.grade(box, task.workdir, task.spec, limits.eval_seconds)
        except GraderFailedError as error:
            if not prepared.may_have_broken_the_command:
                raise
            verdict = Verdict(False, f"the patch took away what the tests need: {error}", "", 0.0)
    return JudgedPatch(verdict, findings)


def grade_row(rollout_id: int, patch_id: int, grader: Grader, verdict: Verdict, findings: list[Finding]) -> NewGrade:
    """Return the row of a verdict."""
    return NewGrade(
        rollout_id=rollout_id,
        patch_id=patch_id,
        grader=grader.name,
        grader_version=grader.version,
        solved=verdict.solved,
        rejected=verdict.rejected,
        rule=verdict.rule,
        reason=verdict.reason,
        tests=verdict.tests,
        fail_to_pass=verdict.fail_to_pass,
        pass_to_pass=verdict.pass_to_pass,
        findings=[asdict(finding) for finding in findings],
        log=pack_text(verdict.log),
        duration_seconds=verdict.duration_seconds,
    )
