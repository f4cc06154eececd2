"""A deadline counts as the agent's own only if no waiting time was left to be credited."""

import pytest

from activities.agent import cut_short
from activities.harnesses.base import ExitReport
from ratchet.types import AgentExit


@pytest.mark.parametrize(
    ("kind", "used", "waited", "expected"),
    [
        (AgentExit.TIME_BUDGET, 100.2, 0.0, False),
        (AgentExit.TIME_BUDGET, 100.2, 12.0, False),  # the watcher is some seconds late
        (AgentExit.TIME_BUDGET, 100.2, 3600.0, True),
        (AgentExit.TIME_BUDGET, 3700.1, 3600.0, False),  # all waiting time was credited
        (AgentExit.TIME_BUDGET, 40.0, 3600.0, False),  # ended as stalled, before its deadline
        (AgentExit.DONE, 100.2, 3600.0, False),
        (AgentExit.CRASHED, 100.2, 3600.0, False),
    ],
)
def test_owed_time(kind: AgentExit, used: float, waited: float, expected: bool) -> None:
    assert cut_short(ExitReport(kind, 137, used, ""), budget_seconds=100.0, waited_seconds=waited) is expected
