"""What a request is that has been made before: a new sample is wanted, or its answer was lost on the way.

Why here: this is the rule by which no token is sampled twice for one call, and no agent that samples again is given an old answer.
Called by: `capture.py`, as often as it takes to tell.

It is a retry only if the earlier call's client is gone, its answer was not written to the last byte, or the SDK says so. The client of
another process shows by its lease being renewed; the one of a process that was killed, by its lease running out.
"""

from enum import StrEnum

from ratchet.store.turns import KnownCall
from ratchet.types import TurnState


class RetryDecision(StrEnum):
    AGAIN = "again"  # meant as such: a new sample in a row of its own
    STORED = "stored"  # the answer that the row has
    JOIN = "join"  # the answer that this process is generating
    TAKE_OVER = "take_over"  # nobody works on it any more: generate for its row
    WAIT = "wait"  # look again


def decide_retry(known: KnownCall, clients_here: int | None, ours: bool, retry: bool, in_time: bool) -> RetryDecision:
    """`clients_here`: how many wait for it in this process, None where it is not generated here. `ours`: its lease has this process's
    name. `retry`: the SDK says so. `in_time`: a lease that nobody renews may not have run out yet."""
    if known.state is TurnState.ABORTED or (known.delivered and not retry):
        return RetryDecision.AGAIN
    attached = known.attached if clients_here is None else clients_here > 0
    if attached and not retry:
        # In flight in our name and not generated here: it is just being opened, or was let go and its lease runs out.
        told_apart = clients_here is not None or (ours and known.state is TurnState.COMPLETED)
        return RetryDecision.AGAIN if told_apart or not in_time else RetryDecision.WAIT
    if known.state is TurnState.COMPLETED:
        return RetryDecision.STORED
    if clients_here is not None:
        return RetryDecision.JOIN
    return RetryDecision.WAIT if known.leased else RetryDecision.TAKE_OVER
