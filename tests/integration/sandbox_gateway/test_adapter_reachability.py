"""A real box tries to reach the adapter, and a failure names address, bind host and remedy."""

from typing import cast

import pytest
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities import run_lifecycle
from activities.adapter_reachability import AdapterReachability
from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from ratchet.payloads import PrepareRunInput, TrainRunInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import RunState
from sandboxes.e2b import E2BProvider
from store import open_runs
from store.database import Database
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess
from tests.integration.training.test_holding_back import View


async def test_a_box_that_reaches_the_adapter(provider: E2BProvider, adapter_address: str) -> None:
    assert await AdapterReachability(provider, f"http://{adapter_address}").problem("host") == ""
    assert await provider.list({"ratchet_probe": "adapter"}) == [], "the box has been ended"


async def test_a_box_that_does_not(provider: E2BProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTER_BIND_HOST", "127.0.0.1")
    found = await AdapterReachability(provider, "http://127.0.0.1:9").problem("host", patience_seconds=0)
    for named in ("http://127.0.0.1:9", "refused", "listens on 127.0.0.1", "ADAPTER_PUBLIC_HOST", "resume"):
        assert named in found
    assert await provider.list({"ratchet_probe": "adapter"}) == []


async def test_a_service_that_gives_no_box_says_nothing_about_the_adapter(gateway: GatewayProcess) -> None:
    away = E2BProvider(API_KEY, "http://127.0.0.1:9", "http://127.0.0.1:9", image_metadata_key="image")
    assert await AdapterReachability(away, "http://127.0.0.1:9").problem("host", patience_seconds=0) == ""


async def test_a_run_is_paused_until_boxes_reach_the_adapter(
    database: Database, run_id: str, provider: E2BProvider, adapter_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried before the first group, and again whenever a person has resumed the run."""
    monkeypatch.setattr(run_lifecycle, "PATIENCE_SECONDS", 0.0)
    settings = load_temporal_settings()
    view = View(database, run_id)
    await view.make()
    adapter = AdapterReachability(provider, "http://127.0.0.1:9")
    configs = RunConfigs(database, settings)
    view.activities = RunActivities(database, settings, configs, cast(Client, None), adapter)
    prepare = PrepareRunInput(input=TrainRunInput(run_id=run_id), run_id=run_id)
    await ActivityEnvironment().run(view.activities.prepare_run, prepare)
    for _ in range(2):
        seen = await view.look()
        assert (seen.state, seen.open_groups) == (RunState.PAUSED, []) and "http://127.0.0.1:9" in seen.reason
        async with database.begin() as connection:
            await open_runs.resume_run(connection, run_id)
    adapter.url = f"http://{adapter_address}"
    seen = await view.look()
    assert seen.state == RunState.RUNNING and seen.open_groups
