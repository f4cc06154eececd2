"""The AdmitTasks workflow: grade every task of a dataset with its gold patch and with an empty one, k times each.

A task is admitted or quarantined, with the evidence in the store. Before a task is admitted, a pool of broken oracles
is made, against which control runs check solved patches, and the gold patch is judged as a grade would judge it. Tasks
whose result is stored are not examined again by a later admission.
"""

import asyncio

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.admission import AdmitActivities, decide_admission
    from ratchet.grading_payloads import (
        AdmissionInput,
        AdmitInput,
        AdmitPage,
        AdmitResult,
        LabelledTask,
        Trial,
        TrialInput,
        TrialResult,
    )
    from workflows.activity_options import FIRST_STAGE, failure_cause, run_activity

_PATCHES: tuple[Trial, Trial] = ("gold", "empty")


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
        """Run all trials of one task one after the other, until one gets no verdict; return whether it is admitted."""
        async with window:
            trials = await self._try_patches(input, page, task)
            if decide_admission(trials).admitted:
                trials += await self._make_pool(input, page, task, trials)
                trials += await self._try_grades(input, page, task)
        examined = AdmissionInput(task_id=task.task_id, trials=trials)
        return (await run_activity(AdmitActivities.record_admission, examined, page.record)).admitted

    async def _try_patches(self, input: AdmitInput, page: AdmitPage, task: LabelledTask) -> list[TrialResult]:
        trials: list[TrialResult] = []
        for repeat in range(input.repeats):
            trials += [
                await self._run_trial(_trial(input, task, patch, repeat), page, task.label) for patch in _PATCHES
            ]
            if any(trial.error for trial in trials):
                break
        return trials

    async def _try_grades(self, input: AdmitInput, page: AdmitPage, task: LabelledTask) -> list[TrialResult]:
        """Judge the gold patch as a grade; as often as the patches are tried, if these are control runs."""
        trials = [await self._run_trial(_trial(input, task, "grade", 0), page, task.label)]
        while len(trials) < input.repeats and trials[-1].patch == "control" and trials[-1].solved:
            trials.append(await self._run_trial(_trial(input, task, "grade", len(trials)), page, task.label))
        return trials

    async def _make_pool(
        self, input: AdmitInput, page: AdmitPage, task: LabelledTask, trials: list[TrialResult]
    ) -> list[TrialResult]:
        """Make broken oracles until there are `broken_oracles` of them, with at most three tries for each."""
        empty = next(trial for trial in trials if trial.patch == "empty")
        made: list[TrialResult] = []
        while len(made) < 3 * input.broken_oracles and sum(one.solved for one in made) < input.broken_oracles:
            known = {"failing": empty.failed, "failed_at": empty.failed_at}
            trial = _trial(input, task, "broken", len(made)).model_copy(update=known)
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


def _trial(input: AdmitInput, task: LabelledTask, patch: Trial, repeat: int) -> TrialInput:
    return TrialInput(
        task_id=task.task_id,
        patch=patch,
        repeat=repeat,
        eval_seconds=input.eval_seconds,
        workspace_seconds=input.workspace_seconds,
        network=input.network,
        user=input.user,
    )
