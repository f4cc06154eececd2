"""`Regrade`: stored patches of a run or a rollout are graded again in fresh boxes; no model is called.

Why here: a grader's new version must be able to judge what the old one judged, k times if need be, and a run can train on the result.
Called by: `ratchet regrade` and the stock `temporal workflow start`.
"""

import asyncio

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.boot import BootActivities
    from activities.grade import GradeActivities
    from activities.regrade import RegradeActivities
    from ratchet.grading_payloads import RegradedInput, RegradedResult, RegradeInput, RegradePage, RegradeResult
    from ratchet.payloads import StageInput
    from ratchet.types import SandboxRole
    from workflows.options import FIRST_STAGE, failure_cause, grading_boot, run_activity

_NOTHING = {"rollouts": 0, "changed": 0, "flaky": 0, "adopted": 0, "without_verdict": 0}


@workflow.defn(name="Regrade", failure_exception_types=[ValidationError])
class Regrade:
    @workflow.run
    async def run(self, input: RegradeInput) -> RegradeResult:
        counts = {**_NOTHING, **input.counts}
        page = await run_activity(RegradeActivities.regrade_page, input, FIRST_STAGE)
        window = asyncio.Semaphore(input.window)
        for result in await asyncio.gather(*(self._patch(input, page, patch, window) for patch in page.patches)):
            counts["rollouts"] += 1
            counts["changed"] += result.changed
            counts["flaky"] += 0 < result.solved < result.graded
            counts["adopted"] += result.adopted
            counts["without_verdict"] += result.graded == 0
        workflow.set_current_details(", ".join(f"{number} {name}" for name, number in counts.items()))
        if page.patches:
            workflow.continue_as_new(input.model_copy(update={"after": page.patches[-1][0], "counts": counts}))
        return RegradeResult(**counts)

    async def _patch(
        self, input: RegradeInput, page: RegradePage, patch: tuple[int, int, int], window: asyncio.Semaphore
    ) -> RegradedResult:
        rollout_id, attempt, patch_id = patch
        async with window:
            given = [await self._grade(input, page, patch, repeat) for repeat in range(input.repeats)]
            work = StageInput(rollout_id=rollout_id, attempt=attempt)
            await run_activity(BootActivities.release, work, page.stages["release"], keep=True)
        settled = RegradedInput(
            rollout_id=rollout_id,
            patch_id=patch_id,
            grade_ids=[grade for grade in given if grade is not None],
            adopt=input.adopt,
        )
        return await run_activity(RegradeActivities.settle_regrade, settled, page.stages["record"], keep=True)

    async def _grade(
        self, input: RegradeInput, page: RegradePage, patch: tuple[int, int, int], repeat: int
    ) -> int | None:
        """Fresh boxes until one has given a verdict; None where none did."""
        rollout_id, attempt, patch_id = patch
        wanted = StageInput(
            rollout_id=rollout_id,
            attempt=attempt,
            role=SandboxRole.GRADE,
            patch_id=patch_id,
            grader=input.grader,
            repeat=repeat,
        )
        for _ in range(page.grade_tries):
            try:
                box = await run_activity(BootActivities.boot, wanted, grading_boot(page.stages))
                work = wanted.model_copy(update={"sandbox_id": box.sandbox_id})
                return (await run_activity(GradeActivities.grade, work, page.stages["grade"], keep=True)).grade_id
            except ActivityError as error:
                if failure_cause(error)[0] == "Cancelled":
                    raise
        return None
