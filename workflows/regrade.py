"""The Regrade workflow: grade the stored patches of a run or a rollout again in fresh boxes, without a model call.

A new version of a grader can judge what an earlier one has judged, and a run can train on the new rewards.
"""

import asyncio

from pydantic import ValidationError
from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.boot import BootActivities
    from activities.grade import GradeActivities
    from activities.regrade import RegradeActivities
    from ratchet.grading_payloads import (
        RegradedInput,
        RegradedResult,
        RegradeInput,
        RegradePage,
        RegradeResult,
        StoredPatch,
    )
    from ratchet.payloads import StageInput
    from ratchet.types import SandboxRole
    from workflows.activity_options import FIRST_STAGE, grading_boot, run_activity, run_activity_even_if_cancelled
    from workflows.box_tries import BoxTries, NoBoxLeftError, release_boxes
    from workflows.control_run import confirm_grade

_NO_COUNTS = {"rollouts": 0, "changed": 0, "flaky": 0, "adopted": 0, "without_verdict": 0}


@workflow.defn(name="Regrade", failure_exception_types=[ValidationError])
class Regrade:
    """Grades a page of patches, at most `window` at a time, and continues as new with the next page."""

    @workflow.run
    async def run(self, input: RegradeInput) -> RegradeResult:
        counts = {**_NO_COUNTS, **input.counts}
        page = await run_activity(RegradeActivities.regrade_page, input, FIRST_STAGE)
        window = asyncio.Semaphore(input.window)
        for result in await asyncio.gather(
            *(self._regrade_patch(input, page, patch, window) for patch in page.patches)
        ):
            counts["rollouts"] += 1
            counts["changed"] += result.changed
            counts["flaky"] += 0 < result.solved < result.graded
            counts["adopted"] += result.adopted
            counts["without_verdict"] += result.graded == 0
        workflow.set_current_details(", ".join(f"{number} {name}" for name, number in counts.items()))
        if page.patches:
            workflow.continue_as_new(input.model_copy(update={"after": page.patches[-1].rollout_id, "counts": counts}))
        return RegradeResult(**counts)

    async def _regrade_patch(
        self, input: RegradeInput, page: RegradePage, patch: StoredPatch, window: asyncio.Semaphore
    ) -> RegradedResult:
        """Grade one patch `repeats` times, kill its boxes and settle the verdicts."""
        async with window:
            given = [await self._grade(input, page, patch, repeat) for repeat in range(input.repeats)]
            await release_boxes(patch.rollout_id, patch.attempt, page.stages)
        settled = RegradedInput(
            rollout_id=patch.rollout_id,
            patch_id=patch.patch_id,
            grade_ids=[grade for grade in given if grade is not None],
            adopt=input.adopt,
        )
        return await run_activity_even_if_cancelled(RegradeActivities.settle_regrade, settled, page.stages["record"])

    async def _grade(self, input: RegradeInput, page: RegradePage, patch: StoredPatch, repeat: int) -> int | None:
        """Grade in new boxes until one gives a verdict; return its grade's id, or None without a verdict."""
        wanted = StageInput(
            rollout_id=patch.rollout_id,
            attempt=patch.attempt,
            role=SandboxRole.GRADE,
            patch_id=patch.patch_id,
            grader=input.grader,
            repeat=repeat,
            datasets=input.datasets,
        )
        tries = BoxTries(page.grade_tries, page.stages["grade"].retry_max_seconds, "no grading box gave a verdict")

        async def grade() -> int:
            box = await run_activity(BootActivities.boot, wanted, grading_boot(page.stages))
            work = wanted.model_copy(update={"sandbox_id": box.sandbox_id, "suspected": list(tries.suspected)})
            given = await run_activity_even_if_cancelled(GradeActivities.grade, work, page.stages["grade"])
            if given.num_control_runs:
                given = await confirm_grade(given, work, page.stages, page.grade_tries)
            return given.grade_id

        async def release(by_host: bool) -> None:
            if by_host and workflow.info().is_continue_as_new_suggested():
                # The page's other patches wait, too: its history would become too long.
                raise NoBoxLeftError("the worker's machine fails")
            await release_boxes(patch.rollout_id, patch.attempt, page.stages, by_host)

        try:
            return await tries.run(grade, release)
        except NoBoxLeftError:
            return None
