"""The Rollout workflow: one try of one agent at one task, from the first box to the outcome.

    claim → boot → workspace → agent → diff → boot → grade → (boot → control_run) → finalise

The workflow decides the order of the stages and what happens if one fails; activities do the work, and Postgres holds
the data. The boot of a further box fails if the rollout's guard is spent (`activities/guard.py`); a stored patch is
graded at least once, and a patch that is suspected gets its second box in any case.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.adhoc_rollouts import AdhocRolloutActivities
    from activities.agent import AgentActivities
    from activities.boot import BootActivities
    from activities.claim_and_finalise import RolloutRecordActivities
    from activities.diff import DiffActivities
    from activities.generate import GenerateActivities
    from activities.grade import GradeActivities
    from activities.workspace import WorkspaceActivities
    from ratchet.payloads import (
        AgentResult,
        Claim,
        DiffResult,
        FinaliseInput,
        GradeResult,
        LiveSandbox,
        RolloutInput,
        RolloutResult,
        StageInput,
        StageResult,
    )
    from ratchet.status_payloads import RolloutStatus
    from ratchet.types import FAILED_OUTCOMES, AgentExit, SandboxRole, Suspicion
    from workflows.activity_options import (
        FIRST_STAGE,
        HARNESS,
        OUTCOME,
        REWARD,
        RUN,
        TASK,
        grading_boot,
        run_activity,
        run_activity_even_if_cancelled,
        shielded,
        stop_if_cancelled,
    )
    from workflows.box_tries import BoxTries, NoBoxLeftError, StarvedAgentError, release_boxes
    from workflows.control_run import confirm_grade


class NoVerdictError(Exception):
    """The rollout can get no verdict. `failure`: its outcome; the message is the reason."""

    def __init__(self, failure: str, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


_WORKS_ON = {
    "workspace": "the task's pre_commands run in the agent's box; the heartbeat of the pending activity names the one",
    "agent": "the agent works on the task; the heartbeat of the pending activity has its model calls and its budget",
    "diff": "the agent's changes are read",
    "generate": "the user's own function works; the heartbeat of the pending activity has its model calls",
    "wait_for_worker": "the worker's machine refused a file or had no network; the stage is tried again in a new box",
    "grade": "the tests run on the patch, in a box of their own; the heartbeat of the pending activity names them",
    "control_run": "the tests run again, including variants that a correct patch must fail",
}
"""Stage → what is done in it, for people who look at the workflow."""

_RECORDS_LOCALLY = "records-locally"
"""Patch since which `claim` and `finalise` are local activities."""

_MAX_SUMMARY_BYTES = 350
"""The largest size of an activity's summary; Temporal's documented limit is 400 bytes."""


@workflow.defn(name="Rollout", failure_exception_types=[ValidationError])
class Rollout:
    """State: current attempt, used seconds by stage, the verdict if there is one, the user's function's results."""

    def __init__(self) -> None:
        self.attempt = 1
        self.used_seconds: dict[str, float] = {}
        self.grade: GradeResult | None = None
        self.generated: DiffResult | None = None
        self.status = RolloutStatus(attempt=1, stage="claim", stage_since="")
        self.summary = ""
        self.limits: dict[str, float] = {}

    @workflow.query(description="The present stage, the box, and what the agent, the patch and the grader have given.")
    def state(self) -> RolloutStatus:
        return self.status

    def _show(self, stage: str = "", **facts: str) -> None:
        """Show the stage that begins now, or what a stage has given, in the details and in the query `state`."""
        if stage:
            since = workflow.now().strftime("%Y-%m-%d %H:%M:%S UTC")
            facts |= {"stage": stage, "stage_since": since}
        self.status = self.status.model_copy(update={"attempt": self.attempt, **facts})
        known = {"box": self.status.box, "agent": self.status.agent, "patch": self.status.patch}
        lines = [
            self.summary,
            self._stage_line(),
            *(f"{name}: {value}" for name, value in [*known.items(), ("verdict", self.status.verdict)] if value),
        ]
        workflow.set_current_details("\n\n".join(lines))

    def _stage_line(self) -> str:
        stage, since = self.status.stage, self.status.stage_since
        if stage not in _WORKS_ON:
            return f"{stage} at {since}" if stage.startswith("ended") else f"{stage} since {since}"
        limit = self.limits.get(stage)
        # An agent's budget is its own time; the limit of its activity is only that of its program's whole life.
        is_limited = limit and stage != "agent"
        known = _WORKS_ON[stage] + (f"; for at most {limit:.0f} s a try" if is_limited else "")
        return f"attempt {self.attempt}: {stage} since {since}: {known}"

    @workflow.run
    async def run(self, input: RolloutInput) -> RolloutResult:
        claim = await self._claim(input)
        if claim.outcome is not None:
            return RolloutResult(rollout_id=claim.rollout_id, outcome=claim.outcome, reward=claim.reward)
        self.attempt = claim.attempt
        self.summary = claim.summary
        self.limits = {name: stage.start_to_close_seconds for name, stage in claim.stages.items()}
        failure = None
        reason = ""
        try:
            stop_if_cancelled()
            patch_id = claim.patch_id or await self._make_patch(claim)
            if self.grade is None:
                await self._grade_patch(claim, patch_id)
        except NoVerdictError as error:
            failure = error.failure
            reason = str(error)
        except BaseException as error:
            if not is_cancelled_exception(error):
                raise
            failure = "cancelled"
            reason = "cancelled"
        # In every case the outcome is recorded and all boxes are released.
        untrained = self.generated.reason if self.generated else ""
        result = await shielded(self._end(claim, failure, reason or untrained))
        if failure == "cancelled":
            raise asyncio.CancelledError
        if result.outcome in FAILED_OUTCOMES and workflow.patched("no-verdict-fails"):  # red in the UI's list
            told = f"{result.outcome}: {reason}" if reason else result.outcome
            message = f"{told}; `ratchet show rollout {claim.rollout_id}` says more"
            raise ApplicationError(message, result, type=result.outcome, non_retryable=True)
        return result

    async def _claim(self, input: RolloutInput) -> Claim:
        if input.rollout_id is None:
            row = await run_activity_even_if_cancelled(AdhocRolloutActivities.prepare_rollout, input, FIRST_STAGE)
            workflow.upsert_search_attributes(  # a member of a group gets them at its start
                [RUN.value_set(row.run_id), TASK.value_set(row.task), HARNESS.value_set(row.harness)]
            )
            input = RolloutInput(rollout_id=row.rollout_id)
        claim, is_local = RolloutRecordActivities.claim, workflow.patched(_RECORDS_LOCALLY)
        return await run_activity_even_if_cancelled(claim, input, FIRST_STAGE, is_local=is_local)

    async def _make_patch(self, claim: Claim) -> int:
        """Make attempts, each in a new box, until one has a patch; return the patch's id."""
        failure = f"no attempt of {claim.box_tries} gave a patch"
        tries = BoxTries(claim.box_tries, claim.stages["workspace"].retry_max_seconds, failure)

        async def attempt() -> int:
            self.attempt += tries.num_failed > 0  # so that it counts attempts that were begun
            return await self._run_attempt(claim)

        try:
            return await tries.run(attempt, partial(self._release, claim))
        except NoBoxLeftError as error:
            raise NoVerdictError("infra_failed", str(error)) from None

    async def _run_attempt(self, claim: Claim) -> int:
        """Run one agent box from boot to patch and return the patch's id. Raises StarvedAgentError."""
        box = await self._boot(claim, SandboxRole.AGENT)
        work = StageInput(rollout_id=claim.rollout_id, attempt=self.attempt, sandbox_id=box.sandbox_id)
        where = f"attempt {self.attempt}, box {box.provider_id}"
        if claim.has_generate:
            self._show("generate")
            once = claim.stages["agent"].model_copy(update={"max_tries": 1})
            taken = self.generated = await run_activity(GenerateActivities.generate, work, once, where)
            self._count_seconds("generate", taken)
        else:
            taken = await self._patch_of_agent(claim, work, where)
        self._show(patch=f"{taken.num_bytes:,} bytes")
        if taken.grade_id is not None:  # an empty patch on a task that is known to need a change
            self.grade = GradeResult(grade_id=taken.grade_id, solved=False)
            self._show(verdict="not solved: the patch is empty")
        return taken.patch_id

    async def _patch_of_agent(self, claim: Claim, work: StageInput, where: str) -> DiffResult:
        self._show("workspace")
        prepared = await run_activity(WorkspaceActivities.workspace, work, claim.stages["workspace"], where)
        self._count_seconds("workspace", prepared)
        self._show("agent")
        worked: AgentResult = await run_activity(AgentActivities.agent, work, claim.stages["agent"], where)
        self._count_seconds("agent", worked)
        did = f"{worked.agent_exit}, {worked.num_turns} model calls"
        if worked.waited_seconds >= 1:
            did += f", of its time {worked.waited_seconds:.0f} s waiting for an engine or the adapter"
        self._show(agent=did)
        if worked.agent_exit is AgentExit.STARVED:
            reason = worked.reason or "the agent could not reach its model"
            raise NoVerdictError("infra_failed", reason) if worked.is_final else StarvedAgentError(reason)
        self._show("diff")
        taken = await run_activity(DiffActivities.diff, work, claim.stages["diff"], f"agent: {did}")
        self._count_seconds("diff", taken)
        return taken

    async def _grade_patch(self, claim: Claim, patch_id: int) -> None:
        """Grade in new boxes until one gives a verdict; a grader's fault never repeats the agent's work."""
        failure = f"no grading box of {claim.grade_tries} gave a verdict"
        tries = BoxTries(claim.grade_tries, claim.stages["grade"].retry_max_seconds, failure)

        async def grade() -> GradeResult:
            work = StageInput(rollout_id=claim.rollout_id, attempt=self.attempt, patch_id=patch_id)
            work = work.model_copy(update={"role": SandboxRole.GRADE, "suspected": tries.suspected})
            given = self.generated.grade if self.generated else None
            return await (self._confirm(claim, given, work) if given else self._grade_in_new_box(claim, work))

        try:
            self.grade = await tries.run(grade, partial(self._release, claim))
        except NoBoxLeftError as error:
            raise NoVerdictError("grader_failed", str(error)) from None
        self._show(verdict=_verdict(self.grade))

    async def _grade_in_new_box(self, claim: Claim, work: StageInput) -> GradeResult:
        box = await self._boot(claim, SandboxRole.GRADE, work.suspected)
        work = work.model_copy(update={"sandbox_id": box.sandbox_id})
        self._show("grade")
        where = f"patch of {self.status.patch or 'an earlier attempt'}, box {box.provider_id}"
        grade = await run_activity_even_if_cancelled(GradeActivities.grade, work, claim.stages["grade"], where)
        self._count_seconds("grade", grade)
        return await self._confirm(claim, grade, work)

    async def _confirm(self, claim: Claim, grade: GradeResult, work: StageInput) -> GradeResult:
        """Return the verdict, which counts only after its control runs if it needs them. Raises NoBoxLeftError."""
        if not grade.num_control_runs:
            return grade
        self._show("control_run", verdict=_verdict(grade))
        confirmed = await confirm_grade(grade, work, claim.stages, claim.grade_tries)
        self._count_seconds("control_run", confirmed)
        return confirmed

    async def _boot(self, claim: Claim, role: SandboxRole, suspected: Sequence[Suspicion] = ()) -> LiveSandbox:
        self._show(f"boot of the {role} box")
        wanted = StageInput(rollout_id=claim.rollout_id, attempt=self.attempt, role=role, suspected=list(suspected))
        options = claim.stages["boot"] if role is SandboxRole.AGENT else grading_boot(claim.stages)
        box = await run_activity(BootActivities.boot, wanted, options, summary=f"{role} box")
        self._count_seconds("boot", box)
        self._show(box=box.provider_id)
        return box

    def _count_seconds(self, stage_name: str, result: StageResult) -> None:
        self.used_seconds[stage_name] = self.used_seconds.get(stage_name, 0.0) + result.used_seconds

    async def _end(self, claim: Claim, failure: str | None, reason: str) -> RolloutResult:
        ending = FinaliseInput(
            rollout_id=claim.rollout_id,
            attempt=self.attempt,
            grade_id=self.grade.grade_id if self.grade else None,
            failure=failure if self.grade is None else None,
            reason=reason,
            used_seconds=self.used_seconds,
        )
        self._show("finalise", **({"verdict": f"none: {reason}"} if ending.failure else {}))
        told = f"{ending.failure}: {reason}" if ending.failure else self.status.verdict
        summary = told.encode()[:_MAX_SUMMARY_BYTES].decode(errors="ignore")
        result = await run_activity_even_if_cancelled(
            RolloutRecordActivities.finalise,
            ending,
            claim.stages["record"],
            summary,
            workflow.patched(_RECORDS_LOCALLY),
        )
        self._show(f"ended as {result.outcome}")
        changes = [OUTCOME.value_set(result.outcome.value)]
        workflow.upsert_search_attributes(
            changes if result.reward is None else [*changes, REWARD.value_set(result.reward)]
        )
        if failure is not None or claim.attempt > 1:
            await self._release(claim)
        return result

    async def _release(self, claim: Claim, by_host: bool = False) -> None:
        await release_boxes(claim.rollout_id, self.attempt, claim.stages, by_host)
        if by_host:
            self._show("wait_for_worker")


def _verdict(grade: GradeResult) -> str:
    if grade.solved:
        return "solved"
    return ("rejected" if grade.rejected else "not solved") + (f": {grade.reason}" if grade.reason else "")
