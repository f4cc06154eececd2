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
from temporalio.exceptions import ActivityError, ApplicationError, WorkflowAlreadyStartedError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.learn import LearnActivities
    from activities.runs import RunActivities
    from ratchet.types import (
        EndRunInput,
        EvaluateInput,
        GroupInput,
        PrepareRunInput,
        RunInput,
        RunPlan,
        RunState,
        RunView,
        StartedGroup,
        StepInput,
        SyncInput,
        TrainRunInput,
        ViewRunInput,
        Wish,
    )
    from workflows.evaluate import Evaluate
    from workflows.options import FIRST_STAGE, attributes, cause, child, stage, to_the_end
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
        plan = await workflow.execute_activity_method(RunActivities.prepare_run, prepare, **stage(FIRST_STAGE))
        try:
            state = await self._steps(plan)
        except ActivityError as error:
            kind, reason = cause(error)
            if kind == "Cancelled":
                await self._cancelled(plan)
                raise
            await self._end(plan, RunState.FAILED, reason)
            raise ApplicationError(reason, type=kind, non_retryable=True) from error
        except BaseException as error:
            if is_cancelled_exception(error):
                await self._cancelled(plan)
            raise
        await self._end(plan, state, "")
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
            await self._evaluate(plan, view)
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
        view = await workflow.execute_activity_method(RunActivities.view_run, look, **stage(plan.stages["record"]))
        workflow.set_current_details(f"step {view.step} of {plan.num_steps}: {plan.summary}; {len(view.open_groups)} groups in flight")
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
        searchable = attributes(plan.run_id, group.task, group.harness, group.step)
        arguments = child(group.workflow_id, searchable, f"group on {group.task}", abandon=True)
        # Started before a continue-as-new or a restart: adopted.
        with contextlib.suppress(WorkflowAlreadyStartedError):
            await workflow.start_child_workflow(RolloutGroup.run, GroupInput(group_id=group.group_id), **arguments)

    async def _step(self, plan: RunPlan) -> bool:
        """Plans, starts the next groups beside it, waits for the learner, brings the engines to the new version."""
        run = RunInput(run_id=plan.run_id)
        planned = await workflow.execute_activity_method(LearnActivities.plan, run, **stage(plan.stages["record"]))
        if planned.step is None:
            return False
        await self._start_groups(plan, await self._view(plan))
        step = StepInput(run_id=plan.run_id, step=planned.step)
        await workflow.execute_activity_method(LearnActivities.step, step, **stage(plan.stages["learn"], summary=f"step {planned.step}"))
        await self._sync(plan, planned.step)
        return True

    async def _sync(self, plan: RunPlan, step: int) -> None:
        run = RunInput(run_id=plan.run_id)
        engines = await workflow.execute_activity_method(LearnActivities.find_engines, run, **stage(plan.stages["learn"]))
        syncs = [SyncInput(run_id=plan.run_id, step=step, engine_id=engine) for engine in engines.engine_ids]
        arguments = stage(plan.stages["learn"], summary=f"version {step}")
        await asyncio.gather(*(workflow.execute_activity_method(LearnActivities.sync, sync, **arguments) for sync in syncs))

    async def _evaluate(self, plan: RunPlan, view: RunView) -> None:
        """Evaluations of this very step that have not ended; nothing is published until they have."""
        for evaluation in plan.evaluations:
            if evaluation.step == view.step and evaluation.label not in view.evaluations_ended:
                arguments = child(
                    f"evaluate/{plan.run_id}/{evaluation.label}", attributes(plan.run_id, step=view.step), f"evaluation {evaluation.label}"
                )
                await workflow.execute_child_workflow(Evaluate.run, EvaluateInput(run_id=plan.run_id, evaluation=evaluation), **arguments)

    async def _cancel_groups(self, view: RunView) -> None:
        for group in view.open_groups:
            try:
                await workflow.get_external_workflow_handle(group.workflow_id).cancel()
            except Exception:
                workflow.logger.info("group is not there to be cancelled")

    async def _cancelled(self, plan: RunPlan) -> None:
        async def clean_up() -> None:
            await self._cancel_groups(await self._view(plan, make_groups=False))
            await self._end(plan, RunState.CANCELLED, "cancelled")

        await to_the_end(clean_up())

    async def _end(self, plan: RunPlan, state: RunState, reason: str) -> None:
        ending = EndRunInput(run_id=plan.run_id, state=state, reason=reason)
        await workflow.execute_activity_method(RunActivities.end_run, ending, **stage(plan.stages["record"]))
