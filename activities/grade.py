"""Stage `grade`: judge a patch in a fresh box; stage `control_run`: check a solved verdict in a further one.

Into a grading box goes only the text of the patch, and only the files of it that the integrity rules let through. A
control run grades the same patch against a broken oracle of the task, or again against the true tests. Each has a fresh
box of its own, so the patch's code cannot tell by its box which of these runs it is in.
"""

import random
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from temporalio import activity

from activities.box_lifecycle import connected_box, try_kill_box
from activities.running_commands import shortened, try_ends
from activities.stage import activity_stage, heartbeating
from activities.stage_context import BoxActivities, StageContext
from grading.base import Grader, Verdict
from grading.broken_oracles import judge_control
from grading.integrity_rules import CONTROL_RUN
from grading.judge_patch import GradingLimits, JudgedPatch, KnownRuns, PatchJudge, find_grader
from ratchet.errors import GraderFailedError, RatchetError, SuspectPatchError
from ratchet.payloads import GradeResult, StageInput
from ratchet.secrets import without_secrets
from ratchet.types import JsonObject
from store import admissions, grades, rollouts, sandboxes
from store.admissions import GraderVersion
from store.arrays import pack_text, unpack_bytes, unpack_text
from store.box_failures import NO_VERDICT, SUSPECT_PATCH, VERDICT_STORED
from store.grades import ControlVerdict, NewGrade
from store.schema import GradeTable, PatchTable

_MAX_REASON_CHARACTERS = 300
_ONLY_A_CODE = re.compile(r"exit code \d+")


@dataclass(eq=False)
class GradeActivities(BoxActivities):
    """The stages grade and control_run; each may run once per box."""

    graders: Mapping[str, Grader]

    @activity_stage("grade")
    async def grade(self, input: StageInput) -> GradeResult:
        """Store a verdict and kill the box. Raises GraderFailedError if no verdict can be given.

        If a rollout's verdict was stored and its answer to the workflow was lost, that verdict is returned.
        """
        started = time.monotonic()
        judge: PatchJudge | None = None
        async with heartbeating(lambda: _tests_of(judge, started)):
            context = await StageContext.load(self.database, self.configs, input, use_box_as="grade", fenced=False)
            patch = await self._patch(input)
            judge = await self._judge(context, patch)
            stored = await self._stored_grade(patch.id)
            if stored is not None:
                await self._release(context, VERDICT_STORED)
                return _result(stored.id, stored, judge, time.monotonic() - started)
            try:
                async with connected_box(self.provider, context.provider_id) as box:
                    judged = await judge.judge(box, unpack_bytes(patch.diff))
            except RatchetError as error:
                await self._release(context, _why_no_verdict(error))
                raise
            verdict = judged.verdict
            row = grade_row(input.rollout_id, patch.id, judge.grader, judged)
            row = replace(row, sandbox_id=context.sandbox_id, repeat=input.repeat)
            async with self.database.begin() as connection:
                grade_id = await grades.store_grade(connection, row)
                await sandboxes.want_sandbox_release(connection, context.sandbox_id, VERDICT_STORED)
            await try_kill_box(self.database, self.provider, context.sandbox_id, context.provider_id)
        return _result(grade_id, verdict, judge, time.monotonic() - started)

    @activity_stage("control_run")
    async def control_run(self, input: StageInput) -> GradeResult:
        """Run the patch of a solved grade against a broken oracle or the true tests, store the result, kill the box.

        If a test passes that must fail, the grade becomes `rejected`; if a true test fails now, it becomes not solved.
        Raises SuspectPatchError if the run gives no evidence and no earlier box ended in the same way.
        """
        assert input.grade_id is not None
        started = time.monotonic()
        judge: PatchJudge | None = None
        async with heartbeating(lambda: _tests_of(judge, started)):
            context = await StageContext.load(
                self.database, self.configs, input, use_box_as="control_run", fenced=False
            )
            patch = await self._patch(input)
            judge = await self._judge(context, patch)
            try:
                verdict = await self._control_verdict(context, judge, input.grade_id, unpack_bytes(patch.diff))
            except RatchetError as error:
                await self._release(context, _why_no_verdict(error))
                raise
            async with self.database.begin() as connection:
                await grades.record_control(connection, input.grade_id, verdict)
                grade = await grades.get_grade(connection, input.grade_id, input.rollout_id, patch.id)
                await sandboxes.want_sandbox_release(connection, context.sandbox_id, VERDICT_STORED)
            await try_kill_box(self.database, self.provider, context.sandbox_id, context.provider_id)
        used = time.monotonic() - started
        reason = _short_reason(grade.reason)
        return GradeResult(
            grade_id=grade.id, solved=grade.solved, rejected=grade.rejected, reason=reason, used_seconds=used
        )

    async def _control_verdict(
        self, context: StageContext, judge: PatchJudge, grade_id: int, diff: bytes
    ) -> ControlVerdict:
        """Make one of the control runs. Their order depends on the grade, so a retry makes the same."""
        runs = judge.known.control_runs(grade_id)
        run_number = context.input.control_number
        if run_number >= len(runs):
            raise GraderFailedError(
                "the task has no broken oracles any more; `ratchet tasks admit --again` makes new ones"
            )
        number = runs[run_number]
        broken = None if number is None else judge.known.broken[number]
        async with connected_box(self.provider, context.provider_id) as box:
            done = await judge.run(box, diff, broken, judge.known.selected)
        if done.run is None:
            raise GraderFailedError(f"the tests of the control run did not run: {done.not_run and done.not_run.reason}")
        if broken is None:
            return _repetition(run_number, judge.verdict(done, judge.known.oracle))
        found = judge_control(broken, done.run, judge.suspected, by_exit=not done.selected)
        reason = "" if found.is_evidence else "no run against a broken oracle ended with a report"
        if found.passed:
            reason = (
                f"{len(found.passed)} tests passed against a broken oracle, first {found.passed[0]}: "
                "they do not test the product"
            )
        return ControlVerdict(
            {
                "run": run_number,
                "broken_oracle": number,
                "passed": found.passed[:50],
                "failed": found.failed,
                "seconds": round(done.run.seconds, 3),
            },
            solved=found.is_evidence and not found.passed,
            rejected=bool(found.passed),
            rule=CONTROL_RUN if found.passed else "",
            reason=reason,
        )

    async def _patch(self, input: StageInput) -> PatchTable:
        assert input.patch_id is not None
        return await self.database.read(rollouts.get_patch, input.patch_id, input.rollout_id)

    async def _judge(self, context: StageContext, patch: PatchTable) -> PatchJudge:
        grader = find_grader(self.graders, context.input.grader or context.task.grader)
        stored = await self.database.read(
            admissions.task_oracle, context.task.id, GraderVersion(grader.name, grader.version)
        )
        known = KnownRuns.of_task(stored, context.task.spec)
        # Drawn before the tests run, and the same for every try: what is kept of a patch depends on it.
        drawn = random.Random(f"{patch.id} {context.input.repeat}").random() < context.config.grading.control_share
        task = context.task
        if context.config.grading.admission == "ignored":  # such a run takes rows at their word
            task = replace(task, spec={**task.spec, "empty_patch_fails": True})
        return PatchJudge(
            grader,
            task,
            GradingLimits.of_run(context.config),
            known,
            patch.base_commit,
            controlled=drawn and bool(known.broken),
            suspected=frozenset(context.input.suspected),
        )

    async def _stored_grade(self, patch_id: int) -> GradeTable | None:
        """Return the verdict that an earlier box of this rollout's workflow has given on the patch."""
        info = activity.info()
        if info.workflow_type != "Rollout" or info.workflow_id is None:
            return None  # a regrade is asked for another verdict
        return await self.database.read(grades.grade_of_workflow, patch_id, info.workflow_id)

    async def _release(self, context: StageContext, reason: str) -> None:
        """Release a box that is not needed any more, so that the next try finds a free one."""
        await self.database.run(sandboxes.want_sandbox_release, context.sandbox_id, reason)
        await try_kill_box(self.database, self.provider, context.sandbox_id, context.provider_id)


def _repetition(run_number: int, again: Verdict) -> ControlVerdict:
    """Return what a second run of the true tests says of a solved grade."""
    result: JsonObject = {
        "run": run_number,
        "broken_oracle": None,
        "passed": [],
        "failed": 0,
        "solved": again.solved,
        "seconds": round(again.duration_seconds, 3),
    }
    reason = "" if again.solved else f"the same tests passed in one box and not in the next: {again.reason}"
    return ControlVerdict(result, again.solved, again.rejected, again.rule, reason)


async def _tests_of(judge: PatchJudge | None, started: float) -> str:
    """Return for the heartbeats which tests run, for how long the stage has run, and when this try ends."""
    if judge is None:
        return f"the patch is read; {try_ends()}"
    command = judge.task.spec.get("eval_cmd")
    what = f"`{shortened(command)}`" if command else f"grader {judge.grader.name}"
    limit = f"the tests may take {judge.limits.eval_seconds:.0f} s"
    ago = f"begun {time.monotonic() - started:.0f} s ago"
    return f"the box gets the repository and the patch and runs the tests {what}; {ago}; {limit}; {try_ends()}"


def _short_reason(reason: str) -> str:
    """Return a reason as one line of bounded length, for a workflow's history; the grade's row has all of it."""
    return " ".join(reason.split())[:_MAX_REASON_CHARACTERS]


def _told_reason(verdict: GradeTable | Verdict) -> str:
    """Return the verdict's short reason; the tests' last line follows an exit code, which alone says too little."""
    if not _ONLY_A_CODE.fullmatch(verdict.reason):
        return _short_reason(verdict.reason)
    log = verdict.log if isinstance(verdict, Verdict) else unpack_text(verdict.log)
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    return _short_reason(f"{verdict.reason}: {without_secrets(last)}" if last else verdict.reason)


def _result(grade_id: int, verdict: GradeTable | Verdict, judge: PatchJudge, seconds: float) -> GradeResult:
    needs_control = verdict.solved and judge.controlled
    return GradeResult(
        grade_id=grade_id,
        solved=verdict.solved,
        rejected=verdict.rejected,
        reason=_told_reason(verdict),
        num_control_runs=len(judge.known.control_runs(grade_id)) if needs_control else 0,
        used_seconds=seconds,
    )


def grade_row(rollout_id: int, patch_id: int, grader: Grader, judged: JudgedPatch) -> NewGrade:
    verdict = judged.verdict
    return NewGrade(
        rollout_id=rollout_id,
        patch_id=patch_id,
        grader=grader.name,
        grader_version=grader.version,
        solved=verdict.solved,
        rejected=verdict.rejected,
        rule=verdict.rule,
        reason=verdict.reason,
        tests=dict(verdict.tests),
        fail_to_pass=verdict.fail_to_pass,
        pass_to_pass=verdict.pass_to_pass,
        rewards=verdict.rewards,
        repeat=0,
        findings=[asdict(finding) for finding in judged.findings],
        flags=[{"what": flag.what, "place": flag.place} for flag in judged.flags],
        has_oracle=verdict.has_oracle,
        log=pack_text(verdict.log),
        duration_seconds=verdict.duration_seconds,
    )


def _why_no_verdict(error: RatchetError) -> str:
    return SUSPECT_PATCH if isinstance(error, SuspectPatchError) else NO_VERDICT
