"""Which errors of a probe mean that an answer is late, and which that the part does not work."""

import httpx
import pytest
from temporalio.service import RPCError, RPCStatusCode

from ratchet.errors import StoreUnavailableError
from stack.probes import ProbeFailedError, is_late


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        httpx.ReadTimeout("no answer"),
        RPCError("Timeout expired", RPCStatusCode.CANCELLED, b""),
        RPCError("deadline", RPCStatusCode.DEADLINE_EXCEEDED, b""),
        caused(StoreUnavailableError("Postgres does not work"), TimeoutError()),
        ProbeFailedError("no heartbeat", is_late=True),
    ],
)
def test_no_answer_in_time_is_late(error: Exception) -> None:
    assert is_late(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        httpx.ConnectError("refused"),
        RPCError("no such namespace", RPCStatusCode.NOT_FOUND, b""),
        RPCError("refused", RPCStatusCode.UNAVAILABLE, b""),
        caused(StoreUnavailableError("Postgres refuses connections"), ConnectionRefusedError()),
        caused(ProbeFailedError("its node is not healthy"), TimeoutError()),
    ],
)
def test_a_refusal_and_a_wrong_answer_are_not_late(error: Exception) -> None:
    assert not is_late(error)
