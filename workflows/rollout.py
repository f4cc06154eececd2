"""`Rollout`: one try of one agent at one task, durable from the first box to the outcome.

    claim → boot → workspace → agent → diff → boot fresh → grade → finalise

Why here: this is the order of things and what happens when one of them fails; activities do the work, Postgres holds the truth.
Called by: `RolloutGroup`, `Evaluate`, `ratchet rollout` and the stock `temporal workflow start`.

Budgets are arithmetic: every stage returns `used_seconds`, the sum is held against the guard. Queueing and outages do not count.
"""

import asyncio

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.agent import AgentActivities
    from activities.boot import BootActivities
    from activities.diff import DiffActivities
    from activities.grade import GradeActivities
    from activities.rollout_records import RecordActivities
    from activities.run_lifecycle import RunActivities
    from activities.workspace import WorkspaceActivities
    from ratchet.payloads import (
        AgentResult,
        Claim,
        FinaliseInput,
        GradeResult,
        LiveSandbox,
        RolloutInput,
        RolloutResult,
        StageInput,
        StageResult,
    )
    from ratchet.types import AgentExit, SandboxRole
    from workflows.options import (
        FIRST_STAGE,
        OUTCOME,
        REWARD,
        failure_cause,
        grading_boot,
        run_activity,
        shielded,
        stop_if_cancelled,
    )


class NoVerdictError(Exception):
    """The rollout cannot get a verdict: `failure` is its outcome."""

    def __init__(self, failure: str, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


@workflow.defn(name="Rollout", failure_exception_types=[ValidationError])
class Rollout:
    def __init__(self) -> None:
        self.attempt = 1
        self.used_seconds: dict[str, float] = {}
        self.grade: GradeResult | None = None

    @workflow.run
    async def run(self, input: RolloutInput) -> RolloutResult:
        claim = await self._claim(input)
        if claim.outcome is not None:
            return RolloutResult(rollout_id=claim.rollout_id, outcome=claim.outcome, reward=claim.reward)
        workflow.set_current_details(claim.summary)
        self.attempt = claim.attempt
        failure, reason = None, ""
        try:
            stop_if_cancelled()
            patch_id = claim.patch_id or await self._agent_part(claim)
            if self.grade is None:
                await self._grade_part(claim, patch_id)
        except NoVerdictError as error:
            failure, reason = error.failure, str(error)
        except BaseException as error:
            if not is_cancelled_exception(error):
                raise
            failure, reason = "cancelled", "cancelled"
        # Whatever happens, the outcome is recorded and both boxes are released.
        result = await shielded(self._end(claim, failure, reason))
        if failure == "cancelled":
            raise asyncio.CancelledError
        return result

    async def _claim(self, input: RolloutInput) -> Claim:
        if input.rollout_id is None:
            row = await run_activity(RunActivities.prepare_rollout, input, FIRST_STAGE, keep=True)
            input = RolloutInput(rollout_id=row.rollout_id)
        return await run_activity(RecordActivities.claim, input, FIRST_STAGE, keep=True)

    async def _agent_part(self, claim: Claim) -> int:
        """Boxes until one attempt has given a patch; returns the patch's id."""
        reason = ""
        for _ in range(claim.box_tries):
            self._check_guard(claim, reason)
            try:
                patch_id = await self._attempt(claim)
                reason = "the agent could not reach its model"
            except ActivityError as error:
                kind, reason = failure_cause(error)
                if kind == "Cancelled":
                    raise
                patch_id = None
            if patch_id is not None:
                return patch_id
            await self._release(claim)
            self.attempt += 1
        raise NoVerdictError("infra_failed", f"no attempt of {claim.box_tries} gave a patch: {reason}")

    async def _attempt(self, claim: Claim) -> int | None:
        """One agent box from boot to patch; None where the agent was starved, which is no fault of its own."""
        box = await self._boot(claim, SandboxRole.AGENT)
        work = StageInput(rollout_id=claim.rollout_id, attempt=self.attempt, sandbox_id=box.sandbox_id)
        prepared = await run_activity(WorkspaceActivities.workspace, work, claim.stages["workspace"])
        self._spend("workspace", prepared)
        worked: AgentResult = await run_activity(AgentActivities.agent, work, claim.stages["agent"])
        self._spend("agent", worked)
        if worked.agent_exit is AgentExit.STARVED:
            return None
        taken = await run_activity(DiffActivities.diff, work, claim.stages["diff"])
        self._spend("diff", taken)
        if taken.grade_id is not None:  # nothing was changed on a task that is known to need a change
            self.grade = GradeResult(grade_id=taken.grade_id, solved=False)
        return taken.patch_id

    async def _grade_part(self, claim: Claim, patch_id: int) -> None:
        """Fresh boxes until one has given a verdict; a grader's fault never costs agent tokens."""
        reason = ""
        for _ in range(claim.grade_tries):
            try:
                box = await self._boot(claim, SandboxRole.GRADE)
                work = StageInput(
                    rollout_id=claim.rollout_id,
                    attempt=self.attempt,
                    sandbox_id=box.sandbox_id,
                    patch_id=patch_id,
                    role=SandboxRole.GRADE,
                )
                self.grade = await run_activity(GradeActivities.grade, work, claim.stages["grade"], keep=True)
                self._spend("grade", self.grade)
                return
            except ActivityError as error:
                kind, reason = failure_cause(error)
                if kind == "Cancelled":
                    raise
                await self._release(claim)
        raise NoVerdictError("grader_failed", f"no grading box of {claim.grade_tries} gave a verdict: {reason}")

    async def _boot(self, claim: Claim, role: SandboxRole) -> LiveSandbox:
        wanted = StageInput(rollout_id=claim.rollout_id, attempt=self.attempt, role=role)
        options = claim.stages["boot"] if role is SandboxRole.AGENT else grading_boot(claim.stages)
        return await run_activity(BootActivities.boot, wanted, options, summary=f"{role} box")

    def _spend(self, stage_name: str, result: StageResult) -> None:
        self.used_seconds[stage_name] = self.used_seconds.get(stage_name, 0.0) + result.used_seconds

    def _check_guard(self, claim: Claim, reason: str) -> None:
        used = sum(self.used_seconds.values())
        if used >= claim.guard_seconds:
            raise NoVerdictError(
                "infra_failed", f"{used:.0f} s of the rollout's {claim.guard_seconds:.0f} s are used up: {reason}"
            )

    async def _end(self, claim: Claim, failure: str | None, reason: str) -> RolloutResult:
        ending = FinaliseInput(
            rollout_id=claim.rollout_id,
            attempt=self.attempt,
            grade_id=self.grade.grade_id if self.grade else None,
            failure=failure if self.grade is None else None,
            reason=reason,
            used_seconds=self.used_seconds,
        )
        result = await run_activity(RecordActivities.finalise, ending, claim.stages["record"], keep=True)
        changes = [OUTCOME.value_set(result.outcome.value)]
        workflow.upsert_search_attributes(
            changes if result.reward is None else [*changes, REWARD.value_set(result.reward)]
        )
        if failure is not None or claim.attempt > 1:
            await self._release(claim)
        return result

    async def _release(self, claim: Claim) -> None:
        """Ends whatever boxes are left of a try that failed; where all goes well `diff` and `grade` end theirs."""
        boxes = StageInput(rollout_id=claim.rollout_id, attempt=self.attempt)
        await run_activity(BootActivities.release, boxes, claim.stages["release"], keep=True)
