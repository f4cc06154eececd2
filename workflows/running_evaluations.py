"""The evaluations that one execution of TrainRun has started; Postgres knows which have begun and ended."""

import asyncio
from collections.abc import Callable, Sequence

from temporalio import workflow
from temporalio.exceptions import CancelledError, ChildWorkflowError, TerminatedError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from activities.evaluations import EvaluationActivities
    from ratchet.evaluation_payloads import EvaluateInput
    from ratchet.payloads import EvaluationPlan, RunPlan
    from workflows.activity_options import child_options, run_activity, search_attributes
    from workflows.evaluate import Evaluate


class RunningEvaluations:
    """Children of TrainRun. `count(workflow_id, what, reason)`: called for one ended by hand; may raise."""

    def __init__(self, count: Callable[[str, str, str], None]) -> None:
        self._count = count
        self._tasks: dict[str, asyncio.Task[bool]] = {}

    @property
    def labels(self) -> list[str]:
        return [label for label, task in self._tasks.items() if not task.done()]

    def start(self, plan: RunPlan, due: Sequence[EvaluationPlan]) -> None:
        """Start those of these evaluations that do not run. Raises the failure of one that has ended."""
        done = {label: task for label, task in self._tasks.items() if task.done()}
        self._tasks = {label: task for label, task in self._tasks.items() if label not in done}
        ended = {label for label, task in done.items() if task.result()}  # after `due` was read
        total = sum(one.num_samples for one in due)
        for one in due:
            if one.label not in self._tasks and one.label not in ended:
                self._tasks[one.label] = asyncio.create_task(self._run(plan, one, one.num_samples / total))

    @property
    def has_news(self) -> bool:
        """True if one has ended. One that has to be started again is no news: that is tried once per poll."""
        done = [task for task in self._tasks.values() if task.done()]
        return any(task.cancelled() or task.exception() is not None or task.result() for task in done)

    async def ended(self) -> bool:
        """Wait for the end of all; return False if one has to be started again. Raises the failure of one."""
        try:
            return all(await asyncio.gather(*self._tasks.values()))
        finally:
            self._tasks = {label: task for label, task in self._tasks.items() if not task.done()}

    async def cancel(self) -> None:
        """Cancel all and wait for their end."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, plan: RunPlan, evaluation: EvaluationPlan, share: float) -> bool:
        searchable = search_attributes(plan.run_id, step=evaluation.step)
        workflow_id = f"evaluate/{plan.run_id}/{evaluation.label}"
        options = child_options(workflow_id, searchable, f"evaluation {evaluation.label}")
        input = EvaluateInput(run_id=plan.run_id, evaluation=evaluation, share=share)
        try:
            await workflow.execute_child_workflow(Evaluate.run, input, **options)
        except WorkflowAlreadyStartedError:  # the child of a terminated execution of this run; it is being cancelled
            return False
        except ChildWorkflowError as error:
            if workflow.cancellation_reason() is not None:
                raise asyncio.CancelledError from error
            if not isinstance(error.cause, CancelledError | TerminatedError):
                raise
            if isinstance(error.cause, TerminatedError):
                self._count(workflow_id, "been terminated", "by hand")
                return False
            # Cancelled by a person: it ends with the verdicts that it has.
            await run_activity(EvaluationActivities.end_evaluation, input, plan.stages["record"])
        return True
