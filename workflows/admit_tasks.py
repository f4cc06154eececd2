"""`AdmitTasks`: every task of a dataset is tried with its gold patch and with none, k times each, and admitted or quarantined.

Why here: which tasks are worth training on is a result like any other: durable, resumable, with its evidence in the store.
Called by: `ratchet tasks admit` and the stock `temporal workflow start`.
"""

import asyncio
from typing import Literal

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.admission import AdmitActivities
    from ratchet.grading_payloads import AdmissionInput, AdmitInput, AdmitPage, AdmitResult, TrialInput, TrialResult
    from workflows.options import FIRST_STAGE, failure_cause, run_activity

PATCHES: tuple[Literal["gold"], Literal["empty"]] = ("gold", "empty")


@workflow.defn(name="AdmitTasks", failure_exception_types=[ValidationError])
class AdmitTasks:
    @workflow.run
    async def run(self, input: AdmitInput) -> AdmitResult:
        counts = {"admitted": 0, "quarantined": 0, **input.counts}
        page = await run_activity(AdmitActivities.admit_page, input, FIRST_STAGE)
        window = asyncio.Semaphore(input.window)
        for admitted in await asyncio.gather(
            *(self._examine(input, page, task_id, label, window) for task_id, label in page.tasks)
        ):
            counts["admitted" if admitted else "quarantined"] += 1
        workflow.set_current_details(f"{counts['admitted']} admitted, {counts['quarantined']} quarantined")
        if page.last is not None:
            workflow.continue_as_new(input.model_copy(update={"after": page.last, "counts": counts}))
        return AdmitResult(admitted=counts["admitted"], quarantined=counts["quarantined"])

    async def _examine(
        self, input: AdmitInput, page: AdmitPage, task_id: int, label: str, window: asyncio.Semaphore
    ) -> bool:
        """All trials of one task, one box after the other; a trial without a verdict ends them."""
        trials: list[TrialResult] = []
        limits = {"eval_seconds": input.eval_seconds, "workspace_seconds": input.workspace_seconds}
        async with window:
            for repeat in range(input.repeats):
                pair = [TrialInput(task_id=task_id, patch=patch, repeat=repeat, **limits) for patch in PATCHES]
                trials += [await self._trial(trial, page, label) for trial in pair]
                if any(trial.error for trial in trials):
                    break
        decision = AdmissionInput(task_id=task_id, trials=trials)
        return (await run_activity(AdmitActivities.record_admission, decision, page.record)).admitted

    async def _trial(self, trial: TrialInput, page: AdmitPage, label: str) -> TrialResult:
        try:
            return await run_activity(
                AdmitActivities.admit_trial, trial, page.trial, summary=f"{trial.patch} patch of {label}"
            )
        except ActivityError as error:
            kind, reason = failure_cause(error)
            if kind == "Cancelled":
                raise
            return TrialResult(patch=trial.patch, error=reason)
