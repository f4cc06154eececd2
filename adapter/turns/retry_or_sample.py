"""Decide whether a repeated request is a client retry or a new sample.

Without this rule, a retry would sample a second answer for one call, or an agent that wants another sample would get
the old one. A request is repeated if the digest of its messages and kind is that of an earlier one in its lane
(`PreparedCall.digest`). It is a retry if a header says so (`x-stainless-retry-count`, or the `Idempotency-Key` of the
earlier call), or if the earlier call's client has disconnected and its answer was not written to its last byte. If its
options ask for another sample, or it has another `Idempotency-Key` than the earlier call (`call_options.py`), it is a
new sample. Of several equal calls it repeats the one with its key, else the newest (`retry_actions.py`). If the
earlier call was aborted, any request is a new sample. A client of another process counts as connected while that
process renews its lease; after a kill the lease expires. If it is uncertain whether the first client is still
connected, a request without the header waits for up to one lease.
"""

from enum import StrEnum

from ratchet.types import TurnState
from store.turns import KnownCall


class RetryDecision(StrEnum):
    AGAIN = "again"  # no retry: sample a new answer, in a row of its own
    STORED = "stored"  # return the answer of the completed row
    JOIN = "join"  # wait for the turn that this process is generating
    # No task generates the row: its process has died, or this one did not learn that it opened it.
    TAKE_OVER = "take_over"  # generate for the same row
    WAIT = "wait"  # undecided: read the row again later


def decide_retry(
    known: KnownCall,
    num_clients_here: int | None,
    is_own: bool,
    is_sdk_retry: bool,
    in_time: bool,
    fits_options: bool = True,
) -> RetryDecision:
    """Decide what a request gets whose digest the turn `known` has (`retry_actions.py`).

    `num_clients_here`: clients of this process that wait for `known`; None if this process does not generate it.
    `is_own`: this process is the worker of the row in flight, or the lease owner of the completed one. `in_time`: less
    than a lease and one poll has passed since the request, so the lease of a process that died may not have expired.
    `fits_options`: what `known` samples can answer the request.
    """
    if known.state is TurnState.ABORTED or not fits_options or (known.delivered and not is_sdk_retry):
        return RetryDecision.AGAIN
    if known.state is TurnState.IN_FLIGHT and is_own and known.leased and num_clients_here is None:
        # This process is opening the row, or never learned that its commit succeeded.
        return RetryDecision.WAIT if in_time else RetryDecision.TAKE_OVER
    has_client = known.attached if num_clients_here is None else num_clients_here > 0
    if has_client and not is_sdk_retry:
        # Wait at most one lease if it is uncertain whether the client is still connected: its process may have died.
        is_certain = num_clients_here is not None or (is_own and known.state is TurnState.COMPLETED)
        return RetryDecision.AGAIN if is_certain or not in_time else RetryDecision.WAIT
    if known.state is TurnState.COMPLETED:
        return RetryDecision.STORED
    if num_clients_here is not None:
        return RetryDecision.JOIN
    return RetryDecision.WAIT if known.leased else RetryDecision.TAKE_OVER
