"""A deadline counts as the agent's own only if no waiting time was left to be credited."""

import pytest

from activities.agent import cut_short, is_too_long, owed_seconds, uncalled
from activities.harnesses.base import ExitReport
from ratchet import secrets
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


@pytest.mark.parametrize(
    ("used", "suspended", "waited", "owed"),
    [
        (100.0, 3.0, 3.0, 0.0),  # it waited for nothing but the worker
        (100.0, 60.0, 80.0, 20.0),  # adapters were away for 20 s before the deadline, and after it
        (100.0, 60.0, 90.0, 30.0),  # it had waited for an engine; the worker came late
        (180.0, 5.0, 85.0, 0.0),  # all of it was credited by the watcher
    ],
)
def test_an_agent_is_owed_what_it_waited_before_its_deadline(
    used: float, suspended: float, waited: float, owed: float
) -> None:
    """An agent that is stopped then is not cut short, however long it was suspended."""
    report = ExitReport(AgentExit.TIME_BUDGET, None, used, "", suspended)
    assert owed_seconds(report, budget_seconds=100.0, waited_seconds=waited) == owed
    assert not cut_short(report, budget_seconds=100.0, waited_seconds=waited)


def test_the_reason_of_an_agent_without_a_call_names_its_end_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "hunter22")
    secrets.with_secrets("harness.extra_env", {"KEY": "${MY_KEY}"})
    crashed = uncalled(ExitReport(AgentExit.CRASHED, 127, 0.1, "sh: claude: not found (hunter22)"), None)
    assert crashed == (
        "the agent made no model call; it ended as crashed with exit code 127: sh: claude: not found (***)"
    )
    assert uncalled(ExitReport(AgentExit.DONE, 0, 0.1, ""), None) == (
        "the agent made no model call; it ended as done with exit code 0"
    )


@pytest.mark.parametrize(
    ("kind", "refusal", "is_final"),
    [
        (AgentExit.TIME_BUDGET, "prompt is too long: 3000 tokens > 512 maximum", True),
        (AgentExit.CRASHED, "request too large: the request is larger than 100 bytes", True),
        (AgentExit.CONTEXT_FULL, None, True),  # the program has measured its prompt by itself
        (AgentExit.CRASHED, "unknown model: 'gpt'", False),
        (AgentExit.CONTEXT_FULL, "for what it contained", False),  # by an adapter of an earlier version
        (AgentExit.CRASHED, None, False),
    ],
)
def test_only_a_prompt_that_does_not_fit_ends_a_rollout_at_once(
    kind: AgentExit, refusal: str | None, is_final: bool
) -> None:
    report = ExitReport(kind, 1, 0.1, "")
    assert is_too_long(report, refusal) is is_final
    assert (refusal or "made no model call") in uncalled(report, refusal)
