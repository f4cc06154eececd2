"""Count the boxes that a rollout may use, by what the boxes did, and wait for a worker whose machine fails."""

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

from ratchet.errors import SuspectPatchError, TemporalUnavailableError, WorkerHostError
from workflows.activity_options import stop_if_cancelled

_OF_THE_HOST = {WorkerHostError.__name__, TemporalUnavailableError.__name__}
_WAITS_PER_LENGTH, _MOST_LENGTHS = 10, 20
"""Waits become longer, so that a machine that fails for many days does not fill the history of a workflow."""
_MOST_LOST = 10
"""Bounds the history, and the boxes of work that ends its worker each time."""


class BoxTries:
    """`left`: how many boxes may still be used. `used`: how many were, lost tries included.

    A try that was lost says nothing about its box, so it is not one of them: the worker, the store or the sandbox
    service was away. It gets a new box all the same, because it may still work in the old one.

    `suspected`: a box could not run the tests of the patch. The patch is to blame if a second box shows the same. Boxes
    that failed for other reasons are no witnesses.

    `retry_seconds`: the first waits for a worker whose machine refuses a file, or which cannot ask Temporal. Such tries
    are not counted, however many there are: a new box does not help, and the old one is not to blame.
    """

    def __init__(self, most: int, retry_seconds: float) -> None:
        self.left = most
        self.suspected = False
        self.used = 0
        self._lost_left = _MOST_LOST
        self.waits_for_host = False
        """Whether the last try was ended by its worker's machine: release its boxes, then call `wait_for_host`."""
        self._retry_seconds = retry_seconds
        self._num_waits = 0

    def count(self, error: Exception) -> None:
        """Count a box whose try has ended with this error."""
        self.used += 1
        # Executions that began earlier count as they did.
        self.waits_for_host = _is_of_the_host(error) and workflow.patched("wait-for-host")
        if self.waits_for_host:
            return
        if not self.suspected and _suspects_patch(error):
            self.suspected = True  # not counted, so that other failures do not take the second box away
            return
        if self._lost_left and _is_lost(error) and workflow.patched("lost-tries"):
            self._lost_left -= 1
        else:
            self.left -= 1

    async def wait_for_host(self) -> None:
        """Wait if the last try was ended by its worker's machine. Raises CancelledError if the workflow is."""
        if not self.waits_for_host:
            return
        stop_if_cancelled()
        self.waits_for_host = False
        length = min(1 + self._num_waits // _WAITS_PER_LENGTH, _MOST_LENGTHS)
        self._num_waits += 1
        await workflow.sleep(self._retry_seconds * length, summary="the worker's machine cannot go on now")


def _suspects_patch(error: Exception) -> bool:
    inner = error.cause if isinstance(error, ActivityError) else None
    return isinstance(inner, ApplicationError) and inner.type == SuspectPatchError.__name__


def _is_of_the_host(error: Exception) -> bool:
    inner = error.cause if isinstance(error, ActivityError) else None
    return isinstance(inner, ApplicationError) and inner.type in _OF_THE_HOST


def _is_lost(error: Exception) -> bool:
    """Return whether a try has ended without its box being the cause: no heartbeat came, its worker was shut down, or
    it failed with an error that the same activity may not have again (`ratchet.errors`)."""
    inner = error.cause if isinstance(error, ActivityError) else None
    if isinstance(inner, TimeoutError):
        return inner.type is TimeoutType.HEARTBEAT
    return isinstance(inner, ApplicationError) and not inner.non_retryable
