"""Numbers → SDK arguments: how a workflow calls a stage, starts a child, and reads a failure.

Why here: temporal.yaml's numbers reach the SDK in one place, so that a workflow reads as decisions only.
Called by: every workflow.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any, TypedDict, TypeVar

from temporalio import workflow
from temporalio.common import (
    RetryPolicy,
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, ChildWorkflowError, TimeoutError
from temporalio.workflow import ActivityCancellationType, ChildWorkflowCancellationType, ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from ratchet.payloads import StageOptions

RUN = SearchAttributeKey.for_keyword("ratchet_run")
TASK = SearchAttributeKey.for_keyword("ratchet_task")
OUTCOME = SearchAttributeKey.for_keyword("ratchet_outcome")
HARNESS = SearchAttributeKey.for_keyword("ratchet_harness")
REWARD = SearchAttributeKey.for_float("ratchet_reward")
STEP = SearchAttributeKey.for_int("ratchet_step")

# Before a workflow knows its run's options (its first activity returns them) it uses these for that activity.
FIRST_STAGE = StageOptions(
    queue="control", start_to_close_seconds=600, heartbeat_seconds=60, retry_initial_seconds=1, retry_max_seconds=30
)


ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


async def shielded(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs `work` to its end, however often this workflow is cancelled meanwhile; the cancellation is raised afterwards."""
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


class ActivityArguments(TypedDict, total=False):
    task_queue: str
    start_to_close_timeout: timedelta
    heartbeat_timeout: timedelta | None
    retry_policy: RetryPolicy
    cancellation_type: ActivityCancellationType
    summary: str | None


def activity_options(options: StageOptions, summary: str | None = None) -> ActivityArguments:
    """Arguments of `workflow.execute_activity`; schedule-to-start is never set: a queue may be long."""
    return {
        "task_queue": options.queue,
        "start_to_close_timeout": timedelta(seconds=options.start_to_close_seconds),
        "heartbeat_timeout": timedelta(seconds=options.heartbeat_seconds) if options.heartbeat_seconds else None,
        "retry_policy": RetryPolicy(
            initial_interval=timedelta(seconds=options.retry_initial_seconds),
            maximum_interval=timedelta(seconds=options.retry_max_seconds),
            maximum_attempts=options.max_tries,
        ),
        # A stage that is told to stop has stopped before the workflow goes on.
        "cancellation_type": ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        "summary": summary,
    }


async def run_activity(
    method: Callable[[Any, ArgumentT], Awaitable[ResultT]],
    argument: ArgumentT,
    options: StageOptions,
    summary: str | None = None,
    keep: bool = False,
) -> ResultT:
    """Runs an activity and returns its result.

    Where an activity ends well while its workflow is being cancelled, the SDK hands over the result and forgets the cancellation: it is
    raised here. `keep`: the result counts for more, and whoever asked looks for the cancellation himself (`stop_if_cancelled`).
    """
    result: ResultT = await workflow.execute_activity_method(method, argument, **activity_options(options, summary))
    if not keep:
        stop_if_cancelled()
    return result


def stop_if_cancelled() -> None:
    if workflow.cancellation_reason() is not None:
        raise asyncio.CancelledError


def grading_boot(stages: Mapping[str, StageOptions]) -> StageOptions:
    """`boot` on the graders' queue: agents that wait for room must not hold up the verdict of one that is done."""
    return stages["boot"].model_copy(update={"queue": stages["grade"].queue})


def search_attributes(
    run: str, task: str | None = None, harness: str | None = None, step: int | None = None
) -> TypedSearchAttributes:
    pairs: list[SearchAttributePair[Any]] = [SearchAttributePair(RUN, run)]
    if task is not None:
        pairs.append(SearchAttributePair(TASK, task))
    if harness is not None:
        pairs.append(SearchAttributePair(HARNESS, harness))
    if step is not None:
        pairs.append(SearchAttributePair(STEP, step))
    return TypedSearchAttributes(pairs)


class ChildArguments(TypedDict, total=False):
    id: str
    task_queue: str
    parent_close_policy: ParentClosePolicy
    cancellation_type: ChildWorkflowCancellationType
    id_reuse_policy: WorkflowIDReusePolicy
    search_attributes: TypedSearchAttributes
    static_summary: str


def child_options(
    workflow_id: str, attributes: TypedSearchAttributes, summary: str, abandon: bool = False
) -> ChildArguments:
    """Arguments of `workflow.start_child_workflow`. The SDK's own close policy would terminate children without clean-up.

    `abandon`: the child outlives its parent, which matters at continue-as-new (the close policy is applied there, too).
    """
    return {
        "id": workflow_id,
        "task_queue": "control",
        "parent_close_policy": ParentClosePolicy.ABANDON if abandon else ParentClosePolicy.REQUEST_CANCEL,
        "cancellation_type": ChildWorkflowCancellationType.ABANDON
        if abandon
        else ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
        "id_reuse_policy": WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
        "search_attributes": attributes,
        "static_summary": summary,
    }


def failure_cause(error: ActivityError | ChildWorkflowError) -> tuple[str, str]:
    """(class name, message) of what ended an activity or a child; `Cancelled` and `TimedOut` for Temporal's own reasons."""
    inner = error.cause
    if isinstance(inner, ActivityError):  # of the child's own
        return failure_cause(inner)
    if isinstance(inner, CancelledError):
        return "Cancelled", "cancelled"
    if isinstance(inner, TimeoutError):
        timed_out = error.activity_type if isinstance(error, ActivityError) else error.workflow_type
        return "TimedOut", f"{timed_out} timed out ({inner.type.name.lower() if inner.type else 'unknown'})"
    if isinstance(inner, ApplicationError):
        return inner.type or "BugError", inner.message
    return "BugError", str(inner or error)
