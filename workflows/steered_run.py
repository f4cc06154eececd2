"""The updates of TrainRun: what a person can ask of a run through Temporal, as `ratchet pause`, `set` and so on do.

A handler only records the request, by one short activity, and wakes the workflow, which reads the run's row at its
next decision. A validator refuses what can be refused without the store, so that a mistake is not even accepted. An
update works as long as the workflow runs; `ratchet` asks Postgres directly and works at any time.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.run_lifecycle import RunActivities
    from ratchet.errors import ConfigError
    from ratchet.payloads import PauseRunInput, RunPlan, RunView
    from ratchet.run_names import require_target_name
    from ratchet.status_payloads import RunStatus
    from ratchet.steering import require_changeable
    from ratchet.steering_payloads import (
        ChangeInput,
        ExtendInput,
        SteerInput,
        SteerRunInput,
        SteerRunResult,
        SteerTargetInput,
        TargetInput,
    )
    from ratchet.types import RunState, SteeringAction, Wish
    from workflows.activity_options import FIRST_STAGE, RUN, STEP, ResultT, failure_cause, run_activity

_UNKNOWN = "a Temporal client"
_UNTOLD_REASON = "something failed, and the reason could not be stored; the workflow's history in Temporal's UI has it"
_Input = TypeVar("_Input", bound=SteerInput)
_STEER_STAGE = FIRST_STAGE.model_copy(update={"start_to_close_seconds": 30})


class SteeredRun:
    """Base class of TrainRun: its updates, its query, the signal that wakes it, and what the UI shows of it.

    State: whether a signal has come; the newest view of the run; what the workflow waits for, and since when; what its
    memo and search attributes say.
    """

    def __init__(self) -> None:
        self.woken = False
        self.view: RunView | None = None
        self.waits_for = ""
        self.waits_since = ""
        self.told: tuple[object, ...] = ()

    @workflow.signal
    def wake(self) -> None:
        """Read the run's state again, because something has changed in Postgres."""
        self.woken = True

    @workflow.query(description="What the run does and waits for.")
    def state(self) -> RunStatus:
        view = self.view
        run_id = workflow.info().workflow_id.removeprefix("run/")
        if view is None:
            return RunStatus(run_id=run_id, waits_for="its preparation")
        return RunStatus(
            run_id=run_id,
            state=view.state,
            reason=view.reason,
            wish=view.wish,
            step=view.step,
            last_step=view.last_step,
            num_open_groups=len(view.open_groups),
            batch_reward_mean=view.batch_reward_mean,
            situation=view.situation,
            waits_for=self.waits_for,
            waits_since=self.waits_since,
        )

    def show(self, plan: RunPlan, view: RunView) -> None:
        """Show the run's state: the details change with each look, memo and search attributes if the step or the state
        has changed, because each change of these is an event of the history."""
        self.view = view
        self._show_details(plan)
        told = (view.state, view.wish, view.step)
        if self.told != told:
            self.told = told
            workflow.upsert_search_attributes([RUN.value_set(plan.run_id), STEP.value_set(view.step)])
            memo = {"state": view.state, "reason": view.reason, "wish": view.wish, "step": view.step}
            workflow.upsert_memo({**memo, "steps": view.num_steps, "batch_reward_mean": view.batch_reward_mean})

    def is_paused(self) -> bool:
        return self.view is not None and self.view.state is RunState.PAUSED

    async def record_pause(self, plan: RunPlan, reason: str) -> None:
        """Pause the run in Postgres. If that fails for good, perhaps because of the reason's text, another reason is
        tried once; if that fails, too, the run is left as it is, and the caller's next failure pauses it again.

        An error of a pause never leaves this method: it would end the run and cancel its groups.
        """
        for text in (reason, _UNTOLD_REASON):
            paused = PauseRunInput(run_id=plan.run_id, reason=text)
            try:
                await run_activity(RunActivities.pause_run, paused, plan.stages["record"], summary=text[:100])
                return
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                workflow.logger.error(f"run not paused: {failure_cause(error).message}")

    def must_look(self) -> bool:
        """Return whether something runs beside what is waited for that may have to be started again."""
        return False

    def has_news(self) -> bool:
        """Return whether the run's state must be read again before the next poll."""
        return self.woken

    async def look_until(
        self, waiting: Awaitable[ResultT], poll_seconds: float, look: Callable[[], Awaitable[None]]
    ) -> ResultT:
        """Look at each signal, and once per poll, until what is waited for has ended; return its result. It is
        cancelled if a look fails: the run is then paused, and waits for the same thing again.

        The wait may take days, and each look adds to the history. So a paused run looks only at signals, and nothing is
        looked at when the history is long enough to continue as new after the wait, unless the run has to look.
        """
        ended = asyncio.ensure_future(waiting)
        try:
            while not ended.done() and (self.must_look() or not workflow.info().is_continue_as_new_suggested()):
                timeout = None if self.is_paused() else timedelta(seconds=poll_seconds)
                with contextlib.suppress(TimeoutError):
                    await workflow.wait_condition(lambda: self.has_news() or ended.done(), timeout=timeout)
                if not ended.done():
                    await look()
            return await ended
        finally:
            if not ended.done():
                ended.cancel()

    def wait_for(self, plan: RunPlan, what: str) -> None:
        """Show what the workflow waits for from now on."""
        self.waits_for = what
        self.waits_since = workflow.now().strftime("%Y-%m-%d %H:%M:%S UTC")
        self._show_details(plan)

    def _show_details(self, plan: RunPlan) -> None:
        view = self.view
        if view is None:
            return
        paused = "paused: " if view.state is RunState.PAUSED else ""
        wish = {Wish.DRAIN: "is drained", Wish.STOP: f"ends after step {view.last_step}"}.get(view.wish, "")
        mean = view.batch_reward_mean
        reward = "" if mean is None else f", mean reward of its batch {mean:.3f}"
        lines = [
            f"{paused}{view.reason}" if view.reason else "",
            wish,
            f"step {view.step} of {view.num_steps}{reward}: {plan.summary}",
            f"{len(view.open_groups)} groups in flight",
            view.situation,
            f"waits for {self.waits_for} since {self.waits_since}" if self.waits_for else "",
        ]
        workflow.set_current_details("\n\n".join(line for line in lines if line))

    @workflow.update(description="Start nothing new until the run is resumed; what is in flight goes on.")
    async def pause(self, input: SteerInput | None = None) -> str:
        return await self._steer(SteeringAction.PAUSE, input or SteerInput())

    @workflow.update(description="Let a paused run go on, or take back the wish to drain or stop it.")
    async def resume(self, input: SteerInput | None = None) -> str:
        return await self._steer(SteeringAction.RESUME, input or SteerInput())

    @workflow.update(description="Start no new groups; end when those in flight are trained, or will never be.")
    async def drain(self, input: SteerInput | None = None) -> str:
        return await self._steer(SteeringAction.DRAIN, input or SteerInput())

    @workflow.update(description="End after the step that is planned, with a checkpoint.")
    async def stop(self, input: SteerInput | None = None) -> str:
        return await self._steer(SteeringAction.STOP, input or SteerInput())

    @pause.validator
    @resume.validator
    @drain.validator
    @stop.validator
    def _accept(self, input: SteerInput | None = None) -> None:
        """Without a validator, arguments that do not fit fail the workflow's task again and again."""

    @workflow.update(description='Add steps: {"steps": 50}.')
    async def extend(self, input: ExtendInput | None = None) -> str:
        return await self._steer(SteeringAction.EXTEND, _given(input))

    @extend.validator
    def _check_extend(self, input: ExtendInput | None = None) -> None:
        _given(input)

    @workflow.update(name="set", description='Change config values: {"changes": {"training.max_staleness": 2}}.')
    async def change(self, input: ChangeInput | None = None) -> str:
        return await self._steer(SteeringAction.SET, _given(input))

    @change.validator
    def _require_changeable(self, input: ChangeInput | None = None) -> None:
        given = _given(input)
        with _refusals():
            for key in given.changes:
                require_changeable(key)

    @workflow.update(description='Cancel a group, rollout or evaluation: {"what": "rollout/RUN/3/0"}.')
    async def cancel(self, input: TargetInput | None = None) -> str:
        return await self._steer_target(SteeringAction.CANCEL, _given(input))

    @workflow.update(description='Run what ended without a verdict again: {"what": "group/RUN/3"}.')
    async def retry(self, input: TargetInput | None = None) -> str:
        return await self._steer_target(SteeringAction.RETRY, _given(input))

    @cancel.validator
    @retry.validator
    def _require_target(self, input: TargetInput | None = None) -> None:
        given = _given(input)
        with _refusals():
            require_target_name(given.what)

    async def _steer(self, action: SteeringAction, input: SteerInput) -> str:
        """Record the request and return what it has changed. Raises ApplicationError with the reason of a refusal."""
        request = SteerRunInput(
            run_id=workflow.info().workflow_id.removeprefix("run/"),
            action=action,
            request_id=_update_id(),
            by=input.by or _UNKNOWN,
            reason=input.reason,
            steps=getattr(input, "steps", 0),
            changes=getattr(input, "changes", {}),
        )
        return await self._answer(run_activity(RunActivities.steer_run, request, _STEER_STAGE, summary=action))

    async def _steer_target(self, action: SteeringAction, input: TargetInput) -> str:
        request = SteerTargetInput(
            run_id=workflow.info().workflow_id.removeprefix("run/"),
            action=action,
            what=input.what,
            request_id=_update_id(),
            by=input.by or _UNKNOWN,
            reason=input.reason,
        )
        return await self._answer(run_activity(RunActivities.steer_target, request, _STEER_STAGE, summary=action))

    async def _answer(self, asking: Awaitable[SteerRunResult]) -> str:
        try:
            answer = await asking
        except ActivityError as error:
            cause = failure_cause(error)
            raise ApplicationError(cause.message, type=cause.kind, non_retryable=True) from None
        self.woken = True
        return answer.text


def _given(input: _Input | None) -> _Input:
    """Return the argument of an update. Raises ApplicationError, which refuses the update, if there is none."""
    if input is None:
        raise ApplicationError(
            "this update needs an argument, one JSON object; its description shows an example",
            type="ConfigError",
            non_retryable=True,
        )
    return input


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise a ConfigError as the ApplicationError that refuses an update."""
    try:
        yield
    except ConfigError as error:
        raise ApplicationError(str(error), type="ConfigError", non_retryable=True) from None


def _update_id() -> str:
    update = workflow.current_update_info()
    assert update is not None, "called by an update"
    return update.id


def final_state(view: RunView) -> RunState:
    """Return how a run ends that has trained its last step."""
    return RunState.DONE if view.last_step == view.num_steps else RunState.STOPPED


def reason_of_end(view: RunView) -> str:
    """Return why the run ends before its last step; empty if it does not."""
    if view.last_step == view.num_steps:
        return ""
    return f"{'stopped' if view.wish is Wish.STOP else 'drained'} after step {view.step} of {view.num_steps}"
