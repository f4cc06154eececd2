"""Have a solved grade confirmed by control runs, for the workflows that grade."""

import asyncio
from functools import partial

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from collections.abc import Mapping

    from activities.boot import BootActivities
    from activities.grade import GradeActivities
    from ratchet.payloads import GradeResult, StageInput, StageOptions
    from workflows.activity_options import grading_boot, run_activity, run_activity_even_if_cancelled
    from workflows.box_tries import BoxTries, release_boxes


async def confirm_grade(
    grade: GradeResult, graded: StageInput, stages: Mapping[str, StageOptions], tries: int
) -> GradeResult:
    """Return the grade after its control runs, which run side by side; one that found against the patch decides.

    `graded`: the argument of its grade stage. If none did and one of them ended without evidence, after `tries` boxes,
    this raises its NoBoxLeftError: such a grade is no verdict.
    """
    runs = [
        graded.model_copy(update={"sandbox_id": None, "grade_id": grade.grade_id, "control_number": number})
        for number in range(grade.num_control_runs)
    ]
    ended = await asyncio.gather(*(_control_run(run, stages, tries) for run in runs), return_exceptions=True)
    results = [result for result in ended if isinstance(result, GradeResult)]
    against = [result for result in results if not result.solved]
    decisive = next((result for result in against if result.rejected), against[0] if against else None)
    for error in ended:
        if isinstance(error, BaseException) and decisive is None:
            raise error
    used_seconds = sum(result.used_seconds for result in results)
    return (decisive or results[-1]).model_copy(update={"used_seconds": used_seconds})


async def _control_run(wanted: StageInput, stages: Mapping[str, StageOptions], most_tries: int) -> GradeResult:
    failure = f"no control run of {most_tries} gave evidence"
    tries = BoxTries(most_tries, stages["grade"].retry_max_seconds, failure)

    async def run_tests() -> GradeResult:
        box = await run_activity(BootActivities.boot, wanted, grading_boot(stages), summary="control box")
        work = wanted.model_copy(update={"sandbox_id": box.sandbox_id, "suspected": list(tries.suspected)})
        return await run_activity_even_if_cancelled(GradeActivities.control_run, work, stages["grade"])

    release = partial(release_boxes, wanted.rollout_id, wanted.attempt, stages, control_number=wanted.control_number)
    return await tries.run(run_tests, release)
