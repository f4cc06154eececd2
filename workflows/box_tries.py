"""Count the boxes that a rollout may use, by what the boxes did."""

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

from ratchet.errors import SuspectPatchError

_MOST_LOST = 10
"""Bounds the history, and the boxes of work that ends its worker each time."""


class BoxTries:
    """`left`: how many boxes may still be used. `used`: how many were, lost tries included.

    A try that was lost says nothing about its box, so it is not one of them: the worker, the store or the sandbox
    service was away. It gets a new box all the same, because it may still work in the old one.

    `unseen`: how many further boxes have to show what this one will show, if it suspects the patch, until the patch is
    to blame. Boxes that failed for other reasons are no witnesses.
    """

    def __init__(self, most: int) -> None:
        self.left = most
        self.unseen = most - 1
        self.used = 0
        self._lost_left = _MOST_LOST

    def count(self, error: Exception) -> None:
        """Count a box whose try has ended with this error."""
        self.used += 1
        if self.unseen and _suspects_patch(error):
            # Such boxes are counted by `unseen` alone, so that other failures do not use up the witnesses.
            self.unseen -= 1
            return
        # Executions that began earlier count as they did.
        if self._lost_left and _is_lost(error) and workflow.patched("lost-tries"):
            self._lost_left -= 1
        else:
            self.left -= 1


def _suspects_patch(error: Exception) -> bool:
    inner = error.cause if isinstance(error, ActivityError) else None
    return isinstance(inner, ApplicationError) and inner.type == SuspectPatchError.__name__


def _is_lost(error: Exception) -> bool:
    """Return whether a try has ended without its box being the cause: no heartbeat came, its worker was shut down, or
    it failed with an error that the same activity may not have again (`ratchet.errors`)."""
    inner = error.cause if isinstance(error, ActivityError) else None
    if isinstance(inner, TimeoutError):
        return inner.type is TimeoutType.HEARTBEAT
    return isinstance(inner, ApplicationError) and not inner.non_retryable
