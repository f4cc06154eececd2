"""The AdmitTasks workflow: grade every task of a dataset with its gold patch and with an empty one, k times each.

A task is admitted or quarantined, with the evidence in the store. For an admitted task a pool of broken oracles is
made, against which control runs check solved patches. Then the gold patch is judged once more as a grade would judge
it, and the task is quarantined if it is not solved. An interrupted admission continues where it was.
"""

import asyncio
from typing import Literal

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.admission import AdmitActivities
    from ratchet.grading_payloads import (
        AdmissionInput,
        AdmitInput,
        AdmitPage,
        AdmitResult,
        LabelledTask,
        TrialInput,
        TrialResult,
    )
    from workflows.activity_options import FIRST_STAGE, failure_cause, run_activity

_PATCHES: tuple[Literal["gold"], Literal["empty"]] = ("gold", "empty")


@workflow.defn(name="AdmitTasks", failure_exception_types=[ValidationError])
class AdmitTasks:
    """Examines a page of tasks, at most `window` at a time, and continues as new with the next page."""

    @workflow.run
    async def run(self, input: AdmitInput) -> AdmitResult:
        counts = {"admitted": 0, "quarantined": 0, **input.counts}
        page = await run_activity(AdmitActivities.admit_page, input, FIRST_STAGE)
        window = asyncio.Semaphore(input.window)

        async def examine(task: LabelledTask) -> None:
            admitted = await self._examine(input, page, task, window)
            counts["admitted" if admitted else "quarantined"] += 1
            workflow.set_current_details(f"{counts['admitted']} admitted, {counts['quarantined']} quarantined")

        await asyncio.gather(*(examine(task) for task in page.tasks))
        if page.last is not None:
            workflow.continue_as_new(input.model_copy(update={"after": page.last, "counts": counts}))
        return AdmitResult(admitted=counts["admitted"], quarantined=counts["quarantined"])

    async def _examine(self, input: AdmitInput, page: AdmitPage, task: LabelledTask, window: asyncio.Semaphore) -> bool:
        """Run all trials of one task one after the other, until one gets no verdict; return whether it is admitted.

        An admitted task then gets its pool of broken oracles, and the gold patch a trial as a grade.
        """
        trials: list[TrialResult] = []
        limits = {"eval_seconds": input.eval_seconds, "workspace_seconds": input.workspace_seconds}
        as_grade = TrialInput(task_id=task.task_id, patch="gold", repeat=input.repeats, as_grade=True, **limits)
        async with window:
            for repeat in range(input.repeats):
                pair = [TrialInput(task_id=task.task_id, patch=patch, repeat=repeat, **limits) for patch in _PATCHES]
                trials += [await self._run_trial(trial, page, task.label) for trial in pair]
                if any(trial.error for trial in trials):
                    break
        decision = AdmissionInput(task_id=task.task_id, trials=trials, complete=False)
        if (await run_activity(AdmitActivities.record_admission, decision, page.record)).admitted:
            async with window:
                trials += await self._make_pool(input, page, task, trials)
                trials.append(await self._run_trial(as_grade, page, task.label))
        complete = AdmissionInput(task_id=task.task_id, trials=trials)
        return (await run_activity(AdmitActivities.record_admission, complete, page.record)).admitted

    async def _make_pool(
        self, input: AdmitInput, page: AdmitPage, task: LabelledTask, trials: list[TrialResult]
    ) -> list[TrialResult]:
        """Make broken oracles until there are `broken_oracles` of them, with at most three tries for each."""
        empty = next(trial for trial in trials if trial.patch == "empty")
        made: list[TrialResult] = []
        while len(made) < 3 * input.broken_oracles and sum(one.solved for one in made) < input.broken_oracles:
            trial = TrialInput(
                task_id=task.task_id,
                patch="broken",
                repeat=len(made),
                eval_seconds=input.eval_seconds,
                workspace_seconds=input.workspace_seconds,
                failing=empty.failed,
                failed_at=empty.failed_at,
            )
            made.append(await self._run_trial(trial, page, task.label))
            if len(made) > 1 and made[-1].error and made[-2].error:
                break  # the task's tests have nothing to break, or its boxes fail
        return made

    async def _run_trial(self, trial: TrialInput, page: AdmitPage, label: str) -> TrialResult:
        try:
            return await run_activity(
                AdmitActivities.admit_trial, trial, page.trial, summary=f"{trial.patch} trial of {label}"
            )
        except ActivityError as error:
            cause = failure_cause(error)
            if cause.is_cancellation:
                raise
            return TrialResult(patch=trial.patch, error=cause.message)
