"""An agent gets back the time for which it waited for an engine or the adapter."""

import asyncio
from dataclasses import dataclass, field

import pytest

from activities import agent
from activities.agent import AgentActivities, is_too_long, owed_seconds, uncalled
from activities.harnesses.base import ExitReport
from activities.harnesses.registry import Harnesses
from activities.run_configs import RunConfigs
from activities.stage_context import StageContext
from ratchet import secrets
from ratchet.background_task import running_beside
from ratchet.payloads import StageInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import AgentExit
from store.tasks import TaskRow
from tests.integration.training.records import make_config
from tests.standins.failing_database import FailingDatabase
from tests.standins.scripted_boxes import ScriptedProvider

CONTEXT = StageContext(
    StageInput(rollout_id=1, attempt=1), 1, "b", make_config(), TaskRow(1, "t", "i", "/w", "script", {}), fence=1
)


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
    report = ExitReport(AgentExit.TIME_BUDGET, None, used, "", suspended)
    assert owed_seconds(report, budget_seconds=100.0, waited_seconds=waited) == owed


def test_the_reason_of_an_agent_without_a_call_names_its_end_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "hunter22")
    secrets.resolve_references("harness.extra_env", {"KEY": "${MY_KEY}"})
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
        (AgentExit.CONTEXT_FULL, "for what it contained", False),
        (AgentExit.CRASHED, None, False),
    ],
)
def test_only_a_prompt_that_does_not_fit_ends_a_rollout_at_once(
    kind: AgentExit, refusal: str | None, is_final: bool
) -> None:
    report = ExitReport(kind, 1, 0.1, "")
    assert is_too_long(report, refusal) is is_final
    assert (refusal or "made no model call") in uncalled(report, refusal)


def activities_with(database: FailingDatabase) -> AgentActivities:
    """The agent stage with boxes of a service that no test asks."""
    configs = RunConfigs(database, load_temporal_settings())
    return AgentActivities(database, ScriptedProvider("http://127.0.0.1:1"), configs, Harnesses(), "http://127.0.0.1:1")


@dataclass
class _DamagedBox:
    """A box whose service once gives an answer that its client does not understand."""

    num_calls: int = 0
    is_renewed: asyncio.Event = field(default_factory=asyncio.Event)

    async def set_ttl(self, seconds: int) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            raise ValueError("<html>nginx 500</html>")
        self.is_renewed.set()


async def test_a_time_to_live_is_renewed_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The box ended before, or the agent's stage failed although the agent had ended well."""
    monkeypatch.setattr(agent, "_TTL_UPDATES_PER_MARGIN", 1e6)
    box = _DamagedBox()
    async with FailingDatabase("postgresql://127.0.0.1:1/none") as database, asyncio.timeout(60):
        renewing = activities_with(database).renew_ttl(box, CONTEXT.config, 1)  # type: ignore[arg-type]
        async with running_beside(renewing):
            await box.is_renewed.wait()


async def test_an_agent_is_watched_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_WATCH_SECONDS", 0.01)
    async with FailingDatabase("postgresql://127.0.0.1:1/none") as database, asyncio.timeout(60):
        database.num_failures = 3
        box = await ScriptedProvider("http://127.0.0.1:1").connect("b")
        watching = activities_with(database)._watch_agent(box, CONTEXT)
        async with running_beside(watching):
            while database.num_failures > 0:
                await asyncio.sleep(0.01)
