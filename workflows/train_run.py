"""The TrainRun workflow `run/<run_id>`: the training loop.

    advance ─▶ start evaluations, groups ─▶ plan ─▶ learner's step ─▶ sync engines ─▶ advance …

Groups are kept in flight up to the staleness bound; a step is planned when enough are ready. The workflow holds no
data: it reads the run's state from Postgres each time it wakes.

If something fails that may not be retried, the run is paused with the reason, and nothing is cancelled; `ratchet
resume` lets it go on. `ratchet.types.RunState` lists the states and who changes them.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

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
        EvaluationPlan,
        GroupInput,
        GroupResult,
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
    from ratchet.types import OPEN_STATES, RunState, Wish
    from workflows.activity_options import (
        FIRST_STAGE,
        child_options,
        failure_cause,
        pause_reason,
        run_activity,
        run_activity_even_if_cancelled,
        search_attributes,
        shielded,
        stop_if_cancelled,
    )
    from workflows.rollout_group import RolloutGroup
    from workflows.running_evaluations import RunningEvaluations
    from workflows.steered_run import SteeredRun, final_state, reason_of_end


MAX_CHILD_FAILURES = 5
"""A run is paused if the workflow of one group fails so often, or that of one evaluation ends so often without a
result, within one execution of TrainRun."""

PREPARE_STAGE = FIRST_STAGE.model_copy(update={"start_to_close_seconds": 86400})
"""Options of `prepare_run`, which reads all weights to digest them. Its heartbeats show that its worker lives."""

ASK_SECONDS = 300.0
"""Time limit of asking Temporal about every open group."""

_GroupHandle = workflow.ChildWorkflowHandle[RolloutGroup, GroupResult]


class ChildFailedError(Exception):
    """The workflow of a group or an evaluation ends again and again; the message is the reason."""


@workflow.defn(name="TrainRun", failure_exception_types=[ValidationError])
class TrainRun(SteeredRun):
    """State: which groups this execution has started, with the handles of those that it did not adopt; how often each
    child has failed; when it last looked for groups whose workflow is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.started: dict[str, _GroupHandle | None] = {}
        self.failures: dict[str, int] = {}
        self.evaluations = RunningEvaluations(self._count)
        self.looked_at: datetime | None = None

    @workflow.run
    async def run(self, input: TrainRunInput) -> str:
        run_id = input.run_id or workflow.info().workflow_id.removeprefix("run/")
        prepare = PrepareRunInput(input=input, run_id=run_id)
        plan = await run_activity_even_if_cancelled(RunActivities.prepare_run, prepare, PREPARE_STAGE)
        try:
            stop_if_cancelled()
            await self._run_to_the_end(plan)
        except BaseException as error:
            if is_cancelled_exception(error):
                await self._stop(plan, RunState.CANCELLED, "cancelled")
                raise
            if not isinstance(error, ActivityError | ChildWorkflowError):
                raise
            cause = failure_cause(error)
            await self._stop(plan, RunState.FAILED, cause.message)
            raise ApplicationError(cause.message, type=cause.kind, non_retryable=True) from error
        await workflow.wait_condition(workflow.all_handlers_finished)
        return plan.run_id

    async def _run_to_the_end(self, plan: RunPlan) -> None:
        """Run the steps and end the run. Pause it if something fails, and go on when it has been resumed."""
        while True:
            try:
                view = await self._run_steps(plan)
                if await self._end(plan, final_state(view), reason_of_end(view), view.last_step):
                    return  # else it has been extended meanwhile
            except (ActivityError, ChildWorkflowError, ValidationError, ChildFailedError) as error:
                if is_cancelled_exception(error):
                    raise
                await self._pause(plan, pause_reason(error))

    async def _pause(self, plan: RunPlan, reason: str) -> None:
        """Pause the run in Postgres and wait a while. The caller then tries again, and pauses again if it has to."""
        stop_if_cancelled()
        if workflow.info().is_continue_as_new_suggested():
            await self._continue_as_new(plan)
        workflow.set_current_details(f"paused: {reason}\n\nRun `ratchet resume {plan.run_id}` when it is mended.")
        self.failures.clear()
        await self.record_pause(plan, reason)
        await self._sleep(plan)

    async def _run_steps(self, plan: RunPlan) -> RunView:
        """Train until the last step is evaluated or the run is stopped; return its state. Continues as new."""
        steps_here = 0
        view = await self._advance(plan)
        if view.wish is not Wish.STOP:
            await self._sync(plan, view.step)
        while True:
            if view.wish is Wish.STOP:
                await self._cancel_groups(group.workflow_id for group in view.open_groups)
                if view.step >= view.last_step:
                    await self._evaluated(plan)
                    return view
            if view.state is RunState.PAUSED:
                view = await self._wait_until_resumed(plan)
                continue
            due = _due_evaluations(view)
            is_last = view.step >= view.last_step
            if is_last and not due:
                return view
            if not is_last and view.wish is not Wish.STOP and (not due or _evaluates_beside()):
                await self._start_groups(plan, view)
            self.evaluations.start(plan, due)
            if due and (is_last or not _evaluates_beside()):
                if not await self._evaluated(plan):
                    await self._sleep(plan)
                # An evaluation takes long: the run may have been paused, stopped, extended or asked for another one.
                view = await self._advance(plan)
                continue
            # The learner sees from its row that a version is evaluated, so it does not publish the next one before.
            plannable = view.plannable and all(one.label in view.evaluations_begun for one in due)
            if plannable and await self._train_step(plan):
                steps_here += 1
            if steps_here >= plan.steps_per_execution or workflow.info().is_continue_as_new_suggested():
                await self._continue_as_new(plan)
            if not plannable:
                await self._sleep(plan)
            view = await self._advance(plan)

    async def _continue_as_new(self, plan: RunPlan) -> None:
        """End this execution once updates are answered, unless an evaluation runs, which would be cancelled."""
        if self.must_look():
            return
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(TrainRunInput(run_id=plan.run_id))

    async def _wait_until_resumed(self, plan: RunPlan) -> RunView:
        """Return the run's state at the first change: it is resumed, or has to stop. Engines of a resumed run are
        brought up to date first, because an update of one of them may be what failed."""
        while True:
            if workflow.info().is_continue_as_new_suggested():
                await self._continue_as_new(plan)
            await self._sleep(plan)
            view = await self._advance(plan)
            if view.wish is Wish.STOP:
                return view
            if view.state is not RunState.PAUSED:
                await self._sync(plan, view.step)
                return view

    async def _advance(self, plan: RunPlan) -> RunView:
        """Do the run's book-keeping, make new groups and return the run's state."""
        self.woken = False
        input = ViewRunInput(run_id=plan.run_id)
        view = await run_activity(RunActivities.advance_run, input, plan.stages["record"], summary="look")
        if view.state not in OPEN_STATES:
            raise ApplicationError(
                f"run {plan.run_id} has ended ({view.state}); `ratchet resume {plan.run_id}` continues it",
                type="RunEnded",
                non_retryable=True,
            )
        self.show(plan, view)
        return view

    async def _sleep(self, plan: RunPlan) -> None:
        """Wait for a signal, at most `poll_seconds`, after which a lost signal does not matter."""
        what = ", ".join([*self.evaluations.labels, "groups, boxes or verdicts"])
        self.wait_for(plan, "a person" if self.is_paused() else what)
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(self.has_news, timeout=timedelta(seconds=plan.poll_seconds))

    def must_look(self) -> bool:
        return bool(self.evaluations.labels)

    def has_news(self) -> bool:
        return super().has_news() or (self.evaluations.has_news and not self.is_paused())

    async def _start_groups(self, plan: RunPlan, view: RunView) -> None:
        """Start the workflow of every open group that has none, also of one that closed although its group is open."""
        open_groups = {group.workflow_id: group for group in view.open_groups}
        self.started = {key: handle for key, handle in self.started.items() if key in open_groups}
        for key in open_groups:
            handle = self.started.get(key)
            if handle is not None and handle.done():
                self._count_failure(key, handle)
                del self.started[key]
        await self._adopt_groups(plan, open_groups)
        missing = [group for key, group in open_groups.items() if key not in self.started]
        handles = await asyncio.gather(*(self._start_group(plan, group) for group in missing))
        self.started |= {group.workflow_id: handle for group, handle in zip(missing, handles, strict=True)}

    async def _adopt_groups(self, plan: RunPlan, open_groups: Mapping[str, StartedGroup]) -> None:
        """At the start of an execution, and then once per poll, look which groups have a workflow that runs.

        It may have been started by an earlier execution, or be lost after an outage although it was started here.
        """
        now = workflow.now()
        if self.looked_at is not None and now - self.looked_at < timedelta(seconds=plan.poll_seconds):
            return
        self.looked_at = now
        run = RunInput(run_id=plan.run_id)
        patient = plan.stages["record"].model_copy(update={"start_to_close_seconds": ASK_SECONDS})
        found = await run_activity(RunActivities.find_running_groups, run, patient, summary="look for lost groups")
        running = set(found.workflow_ids)
        for key in open_groups:
            handle = self.started.get(key)
            if key in running:
                self.started.setdefault(key, None)
            elif handle is None or not handle.done():  # one that has ended meanwhile is counted at the next wake
                self.started.pop(key, None)

    def _count_failure(self, key: str, handle: _GroupHandle) -> None:
        """Raise ChildFailedError if this group's workflow has failed too often. Its end by hand is no failure."""
        error = handle.exception()
        if isinstance(error, ChildWorkflowError) and not isinstance(error.cause, CancelledError | TerminatedError):
            self._count(key, "failed", failure_cause(error).message)

    def _count(self, key: str, what: str, reason: str) -> None:
        self.failures[key] = self.failures.get(key, 0) + 1
        if self.failures[key] >= MAX_CHILD_FAILURES:
            raise ChildFailedError(f"{key} has {what} {self.failures[key]} times: {reason}")

    async def _start_group(self, plan: RunPlan, group: StartedGroup) -> _GroupHandle | None:
        searchable = search_attributes(plan.run_id, group.task, group.harness, group.step)
        options = child_options(group.workflow_id, searchable, f"group on {group.task}", abandon=True)
        # A workflow that an earlier execution of this run has started is adopted.
        with contextlib.suppress(WorkflowAlreadyStartedError):
            handle = await workflow.start_child_workflow(
                RolloutGroup.run, GroupInput(group_id=group.group_id), **options
            )
            handle.add_done_callback(_retrieve_exception)
            return handle
        return None

    async def _train_step(self, plan: RunPlan) -> bool:
        """Plan a step, start the next groups, wait for the learner and update the engines; False if nothing to plan."""
        run = RunInput(run_id=plan.run_id)
        planned = await run_activity(LearnActivities.plan, run, plan.stages["record"], summary="plan a step")
        if planned.step is None:
            return False
        view = await self._advance(plan)
        if view.wish is not Wish.STOP:
            await self._start_groups(plan, view)
        step = StepInput(run_id=plan.run_id, step=planned.step)
        self.wait_for(plan, f"the learner's step {planned.step}")
        training = run_activity(LearnActivities.step, step, plan.stages["learn"], summary=f"step {planned.step}")
        done = await self.look_until(training, plan.poll_seconds, lambda: self._make_groups(plan))
        if not done.trained:
            return False
        await self._evaluated(plan)
        await self._sync(plan, planned.step)
        return True

    async def _make_groups(self, plan: RunPlan) -> None:
        """Make and start groups while the learner works: those that end without signal make room for others."""
        view = await self._advance(plan)
        if view.state is RunState.RUNNING and view.wish is not Wish.STOP:
            await self._start_groups(plan, view)
        # The learner may publish at any time: only those that hold it back may go on.
        self.evaluations.start(plan, [one for one in _due_evaluations(view) if one.label in view.evaluations_begun])

    async def _evaluated(self, plan: RunPlan) -> bool:
        """Wait for the evaluations that run; return False if one has to be started again."""
        if self.evaluations.labels:
            self.wait_for(plan, f"the evaluations {', '.join(self.evaluations.labels)}")
        return await self.evaluations.ended()

    async def _sync(self, plan: RunPlan, step: int) -> None:
        run = RunInput(run_id=plan.run_id)
        self.wait_for(plan, f"the engines, to serve step {step}")
        engines = await run_activity(LearnActivities.find_engines, run, plan.stages["learn"], summary=f"step {step}")
        syncs = [SyncInput(run_id=plan.run_id, step=step, engine_id=engine) for engine in engines.engine_ids]
        await asyncio.gather(
            *(
                run_activity(LearnActivities.sync, sync, plan.stages["learn"], summary=f"version {step}")
                for sync in syncs
            )
        )

    async def _cancel_groups(self, workflow_ids: Iterable[str]) -> None:
        for workflow_id in workflow_ids:
            try:
                await workflow.get_external_workflow_handle(workflow_id).cancel()
            except Exception:
                workflow.logger.info("group has no workflow to cancel")

    async def _stop(self, plan: RunPlan, state: RunState, reason: str) -> None:
        """Cancel the open groups and end the run before its last step, even if the workflow is cancelled.

        If the book-keeping itself fails, which may be why a person cancels the run, the groups that this execution
        knows are cancelled.
        """

        async def stop() -> None:
            await self.evaluations.cancel()
            self.woken = False
            input = ViewRunInput(run_id=plan.run_id, make_groups=False)
            record = plan.stages["record"]
            try:
                view = await run_activity_even_if_cancelled(RunActivities.advance_run, input, record)
            except ActivityError as error:
                workflow.logger.warning(f"cancelled without book-keeping: {failure_cause(error).message}")
                await self._cancel_groups(self.started)
            else:
                self.show(plan, view)
                await self._cancel_groups(group.workflow_id for group in view.open_groups)
            await self._end(plan, state, reason)

        await shielded(stop())

    async def _end(self, plan: RunPlan, state: RunState, reason: str, last_step: int | None = None) -> bool:
        """End the run; return False if it goes on, because it was extended or resumed meanwhile."""
        ending = EndRunInput(run_id=plan.run_id, state=state, reason=reason, last_step=last_step)
        result = await run_activity_even_if_cancelled(
            RunActivities.end_run, ending, plan.stages["record"], summary=f"{state}: {reason}" if reason else state
        )
        return result.ended


def _evaluates_beside() -> bool:
    """Return whether groups start and a step is trained while evaluations run. A run of v0.1.0 waited for their end."""
    return workflow.patched("evaluate-beside-steps")


def _due_evaluations(view: RunView) -> list[EvaluationPlan]:
    """Return the evaluations of this step that have not ended."""
    return [one for one in view.evaluations if one.step == view.step and one.label not in view.evaluations_ended]


def _retrieve_exception(handle: Any) -> None:
    """Mark a group's failure as seen; otherwise the event loop logs it, although Postgres is what counts."""
    if not handle.cancelled():
        handle.exception()
