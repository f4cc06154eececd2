"""`TrainRun`: groups in flight under the staleness bound, a plan when enough are ready, a step, new weights on every engine.

    view ─▶ start groups ─▶ plan ─▶ learner's step ─▶ sync engines ─▶ view …        evaluations at the start and at the end

Why here: the loop of training as decisions; what is true is read from Postgres on every wake.
Called by: `ratchet train`, the supervisor's start and the stock `temporal workflow start`, as workflow `run/<run_id>`.
"""

import asyncio
import contextlib
from datetime import timedelta

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    ChildWorkflowError,
    TerminatedError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from activities.learning import LearnActivities
    from activities.run_lifecycle import RunActivities
    from ratchet.payloads import (
        EndRunInput,
        EvaluateInput,
        EvaluationPlan,
        GroupInput,
        PrepareRunInput,
        RunInput,
        RunPlan,
        RunView,
        StartedGroup,
        StepInput,
        SyncInput,
        TrainRunInput,
        ViewRunInput,
    )
    from ratchet.types import RunState, Wish
    from workflows.evaluate import Evaluate
    from workflows.options import (
        FIRST_STAGE,
        child_options,
        failure_cause,
        run_activity,
        search_attributes,
        shielded,
        stop_if_cancelled,
    )
    from workflows.rollout_group import RolloutGroup


@workflow.defn(name="TrainRun", failure_exception_types=[ValidationError])
class TrainRun:
    def __init__(self) -> None:
        self.woken = False
        self.started: set[str] = set()

    @workflow.signal
    def wake(self) -> None:
        """Something has changed in Postgres; carries nothing."""
        self.woken = True

    @workflow.run
    async def run(self, input: TrainRunInput) -> str:
        run_id = input.run_id or workflow.info().workflow_id.removeprefix("run/")
        prepare = PrepareRunInput(input=input, run_id=run_id)
        plan = await run_activity(RunActivities.prepare_run, prepare, FIRST_STAGE, keep=True)
        try:
            stop_if_cancelled()
            await self._end(plan, await self._steps(plan), "")
        except BaseException as error:
            if is_cancelled_exception(error):
                await self._stop(plan, RunState.CANCELLED, "cancelled")
                raise
            if not isinstance(error, ActivityError | ChildWorkflowError):
                raise
            kind, reason = failure_cause(error)
            await self._stop(plan, RunState.FAILED, reason)
            raise ApplicationError(reason, type=kind, non_retryable=True) from error
        return plan.run_id

    async def _steps(self, plan: RunPlan) -> RunState:
        """Until the last step is evaluated or the run is told to stop; continues as new every `steps_per_execution` steps."""
        steps_here = 0
        view = await self._view(plan)
        await self._sync(plan, view.step)
        while True:
            if view.wish is Wish.STOP:
                await self._cancel_groups(view)
                return RunState.CANCELLED
            if not await self._evaluate(plan, view):
                await self._sleep(plan)
                view = await self._view(plan)
                continue
            if view.step >= plan.num_steps:
                return RunState.DONE
            if view.wish is Wish.NONE:
                await self._start_groups(plan, view)
                if view.plannable and await self._step(plan):
                    steps_here += 1
            if steps_here >= plan.steps_per_execution or workflow.info().is_continue_as_new_suggested():
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(TrainRunInput(run_id=plan.run_id))
            if not view.plannable or view.wish is not Wish.NONE:
                await self._sleep(plan)
            view = await self._view(plan)

    async def _view(self, plan: RunPlan, make_groups: bool = True) -> RunView:
        self.woken = False
        look = ViewRunInput(run_id=plan.run_id, make_groups=make_groups)
        view = await run_activity(RunActivities.view_run, look, plan.stages["record"], keep=not make_groups)
        workflow.set_current_details(
            f"step {view.step} of {plan.num_steps}: {plan.summary}; {len(view.open_groups)} groups in flight"
        )
        return view

    async def _sleep(self, plan: RunPlan) -> None:
        """Until a group says that it has ended, but not for longer than `poll_seconds`: a lost signal costs a minute, not the run."""
        try:
            await workflow.wait_condition(lambda: self.woken, timeout=timedelta(seconds=plan.poll_seconds))
        except TimeoutError:
            # After an outage of the store's or the server's own, a group's workflow may be missing: start them all again, which adopts.
            self.started.clear()

    async def _start_groups(self, plan: RunPlan, view: RunView) -> None:
        for group in view.open_groups:
            if group.workflow_id not in self.started:
                await self._start_group(plan, group)
                self.started.add(group.workflow_id)
        self.started &= {group.workflow_id for group in view.open_groups}

    async def _start_group(self, plan: RunPlan, group: StartedGroup) -> None:
        searchable = search_attributes(plan.run_id, group.task, group.harness, group.step)
        arguments = child_options(group.workflow_id, searchable, f"group on {group.task}", abandon=True)
        # Started before a continue-as-new or a restart: adopted.
        with contextlib.suppress(WorkflowAlreadyStartedError):
            await workflow.start_child_workflow(RolloutGroup.run, GroupInput(group_id=group.group_id), **arguments)

    async def _step(self, plan: RunPlan) -> bool:
        """Plans, starts the next groups beside it, waits for the learner, brings the engines to the new version."""
        run = RunInput(run_id=plan.run_id)
        planned = await run_activity(LearnActivities.plan, run, plan.stages["record"])
        if planned.step is None:
            return False
        await self._start_groups(plan, await self._view(plan))
        step = StepInput(run_id=plan.run_id, step=planned.step)
        await run_activity(LearnActivities.step, step, plan.stages["learn"], summary=f"step {planned.step}")
        await self._sync(plan, planned.step)
        return True

    async def _sync(self, plan: RunPlan, step: int) -> None:
        run = RunInput(run_id=plan.run_id)
        engines = await run_activity(LearnActivities.find_engines, run, plan.stages["learn"])
        syncs = [SyncInput(run_id=plan.run_id, step=step, engine_id=engine) for engine in engines.engine_ids]
        await asyncio.gather(
            *(
                run_activity(LearnActivities.sync, sync, plan.stages["learn"], summary=f"version {step}")
                for sync in syncs
            )
        )

    async def _evaluate(self, plan: RunPlan, view: RunView) -> bool:
        """Evaluations of this very step that have not ended; nothing is published until they have. False where one must be taken up again."""
        due = [one for one in plan.evaluations if one.step == view.step and one.label not in view.evaluations_ended]
        return all(await asyncio.gather(*(self._evaluation(plan, evaluation) for evaluation in due)))

    async def _evaluation(self, plan: RunPlan, evaluation: EvaluationPlan) -> bool:
        searchable = search_attributes(plan.run_id, step=evaluation.step)
        arguments = child_options(
            f"evaluate/{plan.run_id}/{evaluation.label}", searchable, f"evaluation {evaluation.label}"
        )
        try:
            await workflow.execute_child_workflow(
                Evaluate.run, EvaluateInput(run_id=plan.run_id, evaluation=evaluation), **arguments
            )
        except WorkflowAlreadyStartedError:  # of an earlier, terminated life of this run; it is being cancelled
            return False
        except ChildWorkflowError as error:
            if workflow.cancellation_reason() is not None:
                raise asyncio.CancelledError from error
            if not isinstance(error.cause, CancelledError | TerminatedError):
                raise
            return False  # ended by hand: a run has the evaluations that its config says
        return True

    async def _cancel_groups(self, view: RunView) -> None:
        for group in view.open_groups:
            try:
                await workflow.get_external_workflow_handle(group.workflow_id).cancel()
            except Exception:
                workflow.logger.info("group is not there to be cancelled")

    async def _stop(self, plan: RunPlan, state: RunState, reason: str) -> None:
        """The run ends before its last step: what is in flight for it ends, too."""

        async def stop() -> None:
            await self._cancel_groups(await self._view(plan, make_groups=False))
            await self._end(plan, state, reason)

        await shielded(stop())

    async def _end(self, plan: RunPlan, state: RunState, reason: str) -> None:
        ending = EndRunInput(run_id=plan.run_id, state=state, reason=reason)
        await run_activity(RunActivities.end_run, ending, plan.stages["record"], keep=True)
