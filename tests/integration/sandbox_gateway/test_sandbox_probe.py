"""Real boxes try what a run needs of the sandbox service, and a failure names the thing and the remedy.

What the local gateway does right, services that are stand-ins do wrong.
"""

from datetime import UTC, datetime
from typing import cast

import pytest
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities import run_lifecycle
from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from activities.sandbox_probe import SandboxProbe
from ratchet.payloads import PrepareRunInput, TrainRunInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import RunState
from sandboxes.e2b import E2BProvider
from store import open_runs
from store.database import Database
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess
from tests.integration.training.test_holding_back import View
from tests.standins import foreign_boxes
from tests.standins.switched_network import SwitchedProvider


async def test_a_box_that_reaches_the_adapter(provider: E2BProvider, adapter_address: str) -> None:
    assert await SandboxProbe(provider, f"http://{adapter_address}").problem("host") == ""
    assert await provider.list({"ratchet_probe": "adapter"}) == [], "the box has been ended"


async def test_a_box_that_does_not(provider: E2BProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTER_BIND_HOST", "127.0.0.1")
    found = await SandboxProbe(provider, "http://127.0.0.1:9").problem("host", patience_seconds=0)
    for named in ("http://127.0.0.1:9", "refused", "listens on 127.0.0.1", "ADAPTER_PUBLIC_HOST", "resume"):
        assert named in found
    assert await provider.list({"ratchet_probe": "adapter"}) == []


async def test_a_service_that_opens_no_network_for_a_run_that_wants_one(
    provider: E2BProvider, adapter_address: str
) -> None:
    found = await SandboxProbe(provider, f"http://{adapter_address}").problem("host", opened=["agent"])
    assert "allow_internet_access" in found and "resume the run" in found


async def test_a_service_that_gives_no_box_says_nothing_about_the_adapter(gateway: GatewayProcess) -> None:
    away = E2BProvider(API_KEY, "http://127.0.0.1:9", "http://127.0.0.1:9", image_metadata_key="image")
    assert await SandboxProbe(away, "http://127.0.0.1:9").problem("host", patience_seconds=0) == ""


async def test_a_run_is_paused_until_boxes_reach_the_adapter(
    database: Database, run_id: str, gateway: GatewayProcess, adapter_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried before the first group, and again whenever a person has resumed the run."""
    monkeypatch.setattr(run_lifecycle, "PATIENCE_SECONDS", 0.0)
    settings = load_temporal_settings()
    provider = E2BProvider(API_KEY, gateway.url, gateway.url, max_ttl_seconds=gateway.settings.max_ttl_seconds)
    view = View(database, run_id)
    await view.make()
    adapter = SandboxProbe(provider, "http://127.0.0.1:9")
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


async def test_a_run_that_has_begun_is_not_paused_by_a_new_worker(
    database: Database, run_id: str, gateway: GatewayProcess
) -> None:
    """Its workflow prepares it again, for example after an upgrade, when the service has long given what it needs."""
    settings = load_temporal_settings()
    view = View(database, run_id)
    await view.make()
    assert (await view.look()).open_groups
    provider = E2BProvider(API_KEY, gateway.url, gateway.url, max_ttl_seconds=1)
    probe = SandboxProbe(provider, "http://127.0.0.1:9")
    view.activities = RunActivities(database, settings, RunConfigs(database, settings), cast(Client, None), probe)
    prepare = PrepareRunInput(input=TrainRunInput(run_id=run_id), run_id=run_id)
    await ActivityEnvironment().run(view.activities.prepare_run, prepare)
    assert (await view.look()).state == RunState.RUNNING


async def test_a_time_to_live_that_the_service_refuses(provider: E2BProvider, adapter_address: str) -> None:
    found = await SandboxProbe(provider, f"http://{adapter_address}").problem("host", ttl_seconds=90_000)
    for named in ("90000 s", "3600 s this gateway allows", "RATCHET_SANDBOX_MAX_TTL_SECONDS", "resume"):
        assert named in found


@pytest.mark.parametrize(
    ("deviation", "named"),
    [
        (foreign_boxes.NO_METADATA, "metadata of a box"),
        (foreign_boxes.CAPS_TTL, "ends after 60 s"),
        (foreign_boxes.NO_ROUTES, "404 page not found"),
    ],
)
async def test_what_a_service_lacks_is_named_before_the_run_starts(deviation: str, named: str) -> None:
    with foreign_boxes.serving_foreign_boxes(deviation) as service:
        assert named in await SandboxProbe(service.provider(), "http://10.1.2.3:80").problem("image", ttl_seconds=600)
        assert not service.boxes, "its boxes are ended"


@pytest.mark.parametrize("kind", [True, False])
async def test_a_network_that_is_not_what_it_must_be_after_pre_commands(
    gateway: GatewayProcess, adapter_address: str, kind: bool
) -> None:
    """An agent's box reaches the adapter no more, or a grading box still does."""
    provider = SwitchedProvider(API_KEY, gateway.url, gateway.url, max_ttl_seconds=3600)
    probe = SandboxProbe(provider, f"http://{adapter_address}")
    provider.given = {}
    assert await probe.problem("host", opened=["pre_commands"]) == "" and provider.closed == [True, False]
    provider.given = {kind: not kind}
    found = await probe.problem("host", patience_seconds=0, opened=["pre_commands"])
    assert found.startswith("after the network of `pre_commands` was closed: a box ")
    assert ("cannot reach the adapter" if kind else f"reaches http://{adapter_address}/v1/models") in found


async def test_a_probe_that_dies_leaves_its_box_for_minutes() -> None:
    """The run's time to live is only asked for, to see what the service gives."""
    with foreign_boxes.serving_foreign_boxes() as service:
        await SandboxProbe(service.provider(), "http://10.1.2.3:80").problem("image", ttl_seconds=3000)
        assert service.killed and (service.ends[service.killed[0]] - datetime.now(UTC)).total_seconds() <= 300


async def test_a_box_that_reaches_what_it_must_not(gateway: GatewayProcess, adapter_address: str) -> None:
    """The address that boxes reach here although it is not allowed is that of the adapter, seen from outside."""
    for is_open in (False, True):
        provider = E2BProvider(API_KEY, gateway.url, gateway.url, max_ttl_seconds=3600, open_network=is_open)
        url = f"http://{adapter_address}"
        found = await SandboxProbe(provider, url, outside=[f"{url}/"]).problem("host")
        if is_open:
            assert found == "" and provider.capabilities.without
        else:
            assert f"reaches http://{adapter_address}/" in found and "RATCHET_SANDBOX_OPEN_NETWORK" in found


async def test_an_image_that_has_yet_to_be_built_says_nothing(provider: E2BProvider, adapter_address: str) -> None:
    assert await SandboxProbe(provider, f"http://{adapter_address}").problem("no/such:image") == ""


async def test_an_adapter_that_the_service_cannot_open_for_boxes(gateway: GatewayProcess) -> None:
    provider = E2BProvider(API_KEY, gateway.url, gateway.url, adapter_url="http://10.1.2.3:18001")
    assert "network" in await SandboxProbe(provider, "http://10.1.2.3:18001").problem("host")
