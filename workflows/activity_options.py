"""Call activities and child workflows with the options of temporal.yaml, and read their failures."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypedDict, TypeVar

from temporalio import workflow
from temporalio.common import (
    RetryPolicy,
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    ChildWorkflowError,
    FailureError,
    TimeoutError,
)
from temporalio.workflow import ActivityCancellationType, ChildWorkflowCancellationType, ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from ratchet.errors import GuardSpentError
    from ratchet.payloads import StageOptions

RUN = SearchAttributeKey.for_keyword("ratchet_run")
TASK = SearchAttributeKey.for_keyword("ratchet_task")
OUTCOME = SearchAttributeKey.for_keyword("ratchet_outcome")
HARNESS = SearchAttributeKey.for_keyword("ratchet_harness")
REWARD = SearchAttributeKey.for_float("ratchet_reward")
STEP = SearchAttributeKey.for_int("ratchet_step")

FIRST_STAGE = StageOptions(
    queue="", start_to_close_seconds=600, heartbeat_seconds=180, retry_initial_seconds=1, retry_max_seconds=30
)
"""Options of a workflow's first activity, which returns the options of all others. It runs on the workflow's own queue,
because the names of the others depend on the installation."""

_LOCAL_SECONDS = 5.0
"""Limit of a local activity, which holds its workflow's task and is shown nowhere while it runs."""

GUARD_SPENT = GuardSpentError.__name__
"""The `FailureCause.kind` of a stage that found the rollout's guard exceeded."""

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


class ActivityOptions(TypedDict, total=False):
    """Keyword arguments of `workflow.execute_activity_method`."""

    task_queue: str
    start_to_close_timeout: timedelta
    heartbeat_timeout: timedelta | None
    retry_policy: RetryPolicy
    cancellation_type: ActivityCancellationType
    summary: str | None


def activity_options(options: StageOptions, summary: str | None = None) -> ActivityOptions:
    """Return the SDK's options. Schedule-to-start is never set, because a queue may be long."""
    return {
        "task_queue": options.queue or workflow.info().task_queue,
        "start_to_close_timeout": timedelta(seconds=options.start_to_close_seconds),
        "heartbeat_timeout": timedelta(seconds=options.heartbeat_seconds) if options.heartbeat_seconds else None,
        "retry_policy": RetryPolicy(
            initial_interval=timedelta(seconds=options.retry_initial_seconds),
            maximum_interval=timedelta(seconds=options.retry_max_seconds),
            maximum_attempts=options.max_tries,
        ),
        # The workflow continues only after a cancelled activity has stopped.
        "cancellation_type": ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        "summary": summary,
    }


async def run_activity(
    method: Callable[[Any, ArgumentT], Awaitable[ResultT]],
    argument: ArgumentT,
    options: StageOptions,
    summary: str | None = None,
) -> ResultT:
    """Run an activity and return its result; raise CancelledError if the workflow was cancelled meanwhile.

    The SDK alone would return the result of an activity that completes in spite of the cancellation.
    """
    result: ResultT = await workflow.execute_activity_method(method, argument, **activity_options(options, summary))
    stop_if_cancelled()
    return result


async def run_activity_even_if_cancelled(
    method: Callable[[Any, ArgumentT], Awaitable[ResultT]],
    argument: ArgumentT,
    options: StageOptions,
    summary: str | None = None,
    is_local: bool = False,
) -> ResultT:
    """Run an activity and return its result if it completes, even if the workflow was cancelled meanwhile.

    For results that must not be lost, such as a claim or a verdict. The caller checks `stop_if_cancelled`.

    If an activity's completion comes in the same workflow task as the cancellation, the SDK drops the result and raises
    CancelledError. The activity is then run again; activities that are called in this way return what they have stored.

    `is_local`: the first try is a local activity, whose result is one event instead of six. If anything goes wrong with
    it, the activity is run again as any other, which can wait for an outage where people see it.
    """
    wanted = activity_options(options, summary)
    if is_local:
        try:
            return await workflow.execute_local_activity_method(
                method,
                argument,
                schedule_to_close_timeout=timedelta(seconds=_LOCAL_SECONDS),
                retry_policy=RetryPolicy(maximum_attempts=1),
                summary=summary,
            )
        except (FailureError, asyncio.CancelledError):
            pass
    try:
        result: ResultT = await workflow.execute_activity_method(method, argument, **wanted)
    except asyncio.CancelledError:
        result = await workflow.execute_activity_method(method, argument, **wanted)
    return result


def stop_if_cancelled() -> None:
    """Raise CancelledError if the workflow has been cancelled."""
    if workflow.cancellation_reason() is not None:
        raise asyncio.CancelledError


async def shielded(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work` to its end although the workflow is cancelled meanwhile; raise CancelledError afterwards if it was."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


def grading_boot(stages: Mapping[str, StageOptions]) -> StageOptions:
    """Return the options of `boot` on the graders' queue, so that a grade never waits behind agents without a box."""
    return stages["boot"].model_copy(update={"queue": stages["grade"].queue})


def search_attributes(
    run: str, task: str | None = None, harness: str | None = None, step: int | None = None
) -> TypedSearchAttributes:
    """Return the search attributes of a workflow; None leaves one out."""
    values: dict[Any, str | int | None] = {RUN: run, TASK: task, HARNESS: harness, STEP: step}
    return TypedSearchAttributes([SearchAttributePair(key, one) for key, one in values.items() if one is not None])


class ChildOptions(TypedDict, total=False):
    """Keyword arguments of `workflow.start_child_workflow`."""

    id: str
    task_queue: str
    parent_close_policy: ParentClosePolicy
    cancellation_type: ChildWorkflowCancellationType
    id_reuse_policy: WorkflowIDReusePolicy
    search_attributes: TypedSearchAttributes
    static_summary: str


def child_options(
    workflow_id: str, attributes: TypedSearchAttributes, summary: str, abandon: bool = False
) -> ChildOptions:
    """Return the SDK's options of a child, whose default close policy would terminate it without clean-up.

    `abandon`: the child outlives its parent. Needed if the parent continues as new, which applies the close policy,
    too.
    """
    return {
        "id": workflow_id,
        "task_queue": workflow.info().task_queue,
        "parent_close_policy": ParentClosePolicy.ABANDON if abandon else ParentClosePolicy.REQUEST_CANCEL,
        "cancellation_type": ChildWorkflowCancellationType.ABANDON
        if abandon
        else ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
        # Postgres decides what still has to run. If an outage took back what a completed workflow had stored, the
        # workflow runs again; if not, it finds nothing to do.
        "id_reuse_policy": WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        "search_attributes": attributes,
        "static_summary": summary,
    }


class FailureCause(NamedTuple):
    """The reason why an activity or a child failed. `kind`: class name of the error, or `Cancelled` or `TimedOut`."""

    kind: str
    message: str

    @property
    def is_cancellation(self) -> bool:
        return self.kind == "Cancelled"


def failure_cause(error: ActivityError | ChildWorkflowError) -> FailureCause:
    """Return the innermost cause of a failed activity or child workflow."""
    inner = error.cause
    if isinstance(inner, ActivityError):  # an activity of the child
        return failure_cause(inner)
    if isinstance(inner, CancelledError):
        return FailureCause("Cancelled", "cancelled")
    if isinstance(inner, TimeoutError):
        timed_out = error.activity_type if isinstance(error, ActivityError) else error.workflow_type
        reason = inner.type.name.lower() if inner.type else "unknown"
        return FailureCause("TimedOut", f"{timed_out} timed out ({reason})")
    if isinstance(inner, ApplicationError):
        return FailureCause(inner.type or "BugError", inner.message)
    return FailureCause("BugError", str(inner or error))


def pause_reason(error: Exception) -> str:
    """Return why a run is paused, as one sentence."""
    if isinstance(error, ActivityError):
        return f"{error.activity_type} failed: {failure_cause(error).message}"
    if isinstance(error, ChildWorkflowError):
        return f"{error.workflow_id} failed: {failure_cause(error).message}"
    return " ".join(str(error).split())
