"""Have a solved grade confirmed by a control run, for the workflows that grade."""

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
    """Return the grade after its control runs, not solved if one of them does not confirm it.

    `graded`: the argument of its grade stage. A run without evidence confirms nothing: if two boxes show the same end,
    the grade is not solved. If `tries` boxes fail otherwise, there is no verdict, and this raises NoBoxLeftError.
    """
    confirmed = grade
    used_seconds = 0.0
    for number in range(grade.num_control_runs):
        wanted = graded.model_copy(update={"sandbox_id": None, "grade_id": grade.grade_id, "control_number": number})
        confirmed = await _control_run(wanted, stages, tries)
        used_seconds += confirmed.used_seconds
        if not confirmed.solved:
            break
    return confirmed.model_copy(update={"used_seconds": used_seconds})


async def _control_run(wanted: StageInput, stages: Mapping[str, StageOptions], most_tries: int) -> GradeResult:
    failure = f"no control run of {most_tries} gave evidence"
    tries = BoxTries(most_tries, stages["grade"].retry_max_seconds, failure)

    async def run_tests() -> GradeResult:
        box = await run_activity(BootActivities.boot, wanted, grading_boot(stages), summary="control box")
        work = wanted.model_copy(update={"sandbox_id": box.sandbox_id, "suspected": list(tries.suspected)})
        return await run_activity_even_if_cancelled(GradeActivities.control_run, work, stages["grade"])

    return await tries.run(run_tests, partial(release_boxes, wanted.rollout_id, wanted.attempt, stages))
