"""Do the work of a rollout in new boxes until one try succeeds, and count the boxes by how their tries have ended."""

from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from activities.boot import BootActivities
    from ratchet.errors import SuspectPatchError, TemporalUnavailableError, WorkerHostError
    from ratchet.payloads import StageInput, StageOptions
    from ratchet.types import Suspicion
    from workflows.activity_options import (
        GUARD_SPENT,
        ResultT,
        failure_cause,
        run_activity_even_if_cancelled,
        stop_if_cancelled,
    )

_OF_THE_HOST = {WorkerHostError.__name__, TemporalUnavailableError.__name__}
_WAITS_PER_LENGTH, _MOST_LENGTHS = 10, 20
"""Waits become longer, so that a machine that fails for many days does not fill the history of a workflow."""
_MOST_INTERRUPTED = 10
"""Bounds the history, and the boxes of work that ends its worker each time."""


class NoBoxLeftError(Exception):
    """The work gets no further box; the message says how its newest try has ended."""


class StarvedAgentError(Exception):
    """The agent gave no evidence about the policy, which is not its fault; the message is the reason."""


class _Ending(Enum):
    """The way in which a failed try has ended."""

    BOX_FAILED = auto()
    """Counts as a try, unless the box raised a new suspicion: the second box, which decides, is always available."""
    INTERRUPTED = auto()
    """The worker, the store or the sandbox service was away, which says nothing about the box. The work gets a new box
    all the same, because the interrupted try may still work in the old one."""
    HOST_FAILED = auto()
    """The worker's machine refuses a file, or cannot ask Temporal. It is waited for and never counted: a new box does
    not help, and the old one is not to blame."""


class BoxTries:
    """State: `suspected`, what boxes showed that a patch and a machine can both cause; `num_failed`, the boxes whose
    try has failed.

    `most`: the number of boxes that may fail. `wait_seconds`: the first waits for a worker whose machine fails.
    `failure`: a clause that ends the reason of NoBoxLeftError.
    """

    def __init__(self, most: int, wait_seconds: float, failure: str) -> None:
        self.suspected: list[Suspicion] = []
        self.num_failed = 0
        self._left = most
        self._interrupted_left = _MOST_INTERRUPTED
        self._num_waits = 0
        self._wait_seconds = wait_seconds
        self._failure = failure

    async def run(self, work: Callable[[], Awaitable[ResultT]], release: Callable[[bool], Awaitable[None]]) -> ResultT:
        """Return the result of `work`, which boots a new box each time that it is called.

        `release` kills the boxes of a failed try; its argument is True if the worker's machine ended the try. Raises
        NoBoxLeftError if all boxes have failed or the rollout's guard is spent, CancelledError if the workflow is
        cancelled.
        """
        reason = ""
        while self._left:
            try:
                return await work()
            except StarvedAgentError as error:
                ending, suspicion = _Ending.BOX_FAILED, None
                reason = str(error)
            except ActivityError as error:
                cause = failure_cause(error)
                if cause.is_cancellation:
                    raise
                if cause.kind == GUARD_SPENT:
                    spent = f"{reason} (no further box: {cause.message})" if reason else cause.message
                    raise NoBoxLeftError(spent) from None
                ending, suspicion = _ending(error), _suspicion(error)
                reason = cause.message
            self._count(ending, suspicion)
            await release(ending is _Ending.HOST_FAILED)
            if ending is _Ending.HOST_FAILED:
                await self._wait_for_host()
        raise NoBoxLeftError(f"{reason} ({self._failure})")

    def _count(self, ending: _Ending, suspicion: Suspicion | None) -> None:
        self.num_failed += 1
        if suspicion is not None and suspicion not in self.suspected:
            self.suspected.append(suspicion)
        elif ending is _Ending.INTERRUPTED and self._interrupted_left:
            self._interrupted_left -= 1
        elif ending is not _Ending.HOST_FAILED:
            self._left -= 1

    async def _wait_for_host(self) -> None:
        stop_if_cancelled()
        length = min(1 + self._num_waits // _WAITS_PER_LENGTH, _MOST_LENGTHS)
        self._num_waits += 1
        await workflow.sleep(self._wait_seconds * length, summary="the worker's machine cannot go on now")


def _ending(error: ActivityError) -> _Ending:
    """Classify a failed activity by its error.

    A try is interrupted if no heartbeat came, its worker was shut down, or it failed with a retryable error
    (`ratchet.errors`).
    """
    inner = error.cause
    if isinstance(inner, TimeoutError) and inner.type is TimeoutType.HEARTBEAT:
        return _Ending.INTERRUPTED
    if not isinstance(inner, ApplicationError):
        return _Ending.BOX_FAILED
    if inner.type in _OF_THE_HOST:
        return _Ending.HOST_FAILED
    return _Ending.BOX_FAILED if inner.non_retryable else _Ending.INTERRUPTED


def _suspicion(error: ActivityError) -> Suspicion | None:
    """Return what a box showed of the patch, None if the try failed otherwise."""
    inner = error.cause
    if isinstance(inner, ApplicationError) and inner.type == SuspectPatchError.__name__:
        return Suspicion(inner.details[0])
    return None


async def release_boxes(
    rollout_id: int, attempt: int, stages: Mapping[str, StageOptions], by_host: bool = False
) -> None:
    """Kill the boxes that a rollout still holds; `diff` and `grade` kill their own if they succeed.

    `by_host`: the worker's machine ended the try, so the time with its boxes does not count against the guard. If the
    activity fails, the sweep kills the boxes: those that are not needed any more decide nothing about the outcome.
    """
    boxes = StageInput(rollout_id=rollout_id, attempt=attempt, ended_by_host=by_host)
    what = f"boxes of attempt {attempt}"
    try:
        await run_activity_even_if_cancelled(BootActivities.release, boxes, stages["release"], what)
    except ActivityError as error:
        if failure_cause(error).is_cancellation:
            raise
        workflow.logger.warning("boxes not released: %s", failure_cause(error).message)
