"""The real SDK and the provider against services with E2B's API that we did not write, one deviation at a time."""

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from ratchet.errors import ConfigError, SandboxBusyError, SandboxGoneError, SandboxRefusesError
from sandboxes.base import OpenedFirst
from sandboxes.e2b import E2BProvider
from tests.standins import foreign_boxes
from tests.standins.foreign_boxes import ForeignBoxes, serving_foreign_boxes
from tests.standins.http_server import LoopbackServer, QuietHandler


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[ForeignBoxes]:
    with serving_foreign_boxes(getattr(request, "param", "")) as found:
        yield found


def served_by(*deviations: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("service", deviations, indirect=True)


async def create(provider: E2BProvider, key: str = "", **options: Any) -> str:
    made = await provider.create(
        "an/image", ttl_seconds=600, metadata={"owner": "us"}, idempotency_key=key or uuid.uuid4().hex, **options
    )
    return made.id


@served_by("", foreign_boxes.OLD_ROUTES, foreign_boxes.IGNORES_KEYS)
async def test_a_repeated_create_call_makes_one_box(service: ForeignBoxes) -> None:
    """Also in another process, after a lost answer, and with a service that knows no such keys."""
    first, second = service.provider(), service.provider()
    key = uuid.uuid4().hex
    box = await create(first, key)
    assert [await create(one, key) for one in (first, second, second)] == [box] * 3
    assert list(service.boxes) == [box]
    others = {await create(first), await create(second)}
    assert len(others) == 2 and service.boxes.keys() == {box, *others}


@served_by(foreign_boxes.OLD_ROUTES)
async def test_an_older_service_is_asked_at_its_own_routes(service: ForeignBoxes) -> None:
    provider = service.provider()
    box = await create(provider)
    service.paused.add(box)
    assert (await provider.connect(box)).id == box and not service.paused
    assert all(body["secure"] for body in service.created), "older services leave a box open without it"


@served_by(foreign_boxes.NO_ROUTES)
async def test_a_service_without_a_route_is_named_with_what_it_answered(service: ForeignBoxes) -> None:
    with pytest.raises(SandboxRefusesError, match="404 page not found") as refused:
        await create(service.provider())
    for named in (service.url, "POST", "/v2/sandboxes", "E2B_API_URL", "E2B_DOMAIN"):
        assert named in str(refused.value)


@served_by("", foreign_boxes.NO_TOKEN, foreign_boxes.FEW_FIELDS)
async def test_connecting_does_not_move_the_end_of_a_box(service: ForeignBoxes) -> None:
    provider = service.provider()
    box = await create(provider)
    ends_at = service.ends[box]
    await provider.connect(box)
    assert abs((service.ends[box] - ends_at).total_seconds()) < 2


@served_by("", foreign_boxes.OTHER_WORDS)
async def test_a_box_that_is_gone_is_gone_in_any_words(service: ForeignBoxes) -> None:
    provider = service.provider()
    box = await provider.connect(await create(provider))
    service.boxes.clear()
    assert not await provider.kill(box.id)
    await box.kill()
    for call in (provider.connect(box.id), provider.describe(box.id), box.set_ttl(5), box.exec("true")):
        with pytest.raises(SandboxGoneError):
            await call
    with pytest.raises(SandboxGoneError):
        await box.read_file("/x")


async def test_a_paused_box_is_named_and_the_command_is_not_blamed(service: ForeignBoxes) -> None:
    provider = service.provider()
    box = await provider.connect(await create(provider))
    service.paused.add(box.id)
    with pytest.raises(SandboxBusyError, match=f"{box.id} is paused"):
        await box.exec("true", timeout=1)
    await provider.connect(box.id)
    assert not service.paused


async def test_a_row_without_a_field_names_the_field_and_the_service() -> None:
    rows: list[dict[str, Any]] = [{}, {"sandboxID": "b"}, {"sandboxID": "b", "startedAt": "yesterday"}]

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps([rows[0]]).encode())

    server = LoopbackServer(Handler)
    try:
        for named in ("sandboxID", "startedAt", "yesterday"):
            with pytest.raises(SandboxRefusesError, match=named) as refused:
                await E2BProvider("e2b_x", server.url, server.url).list({})
            assert server.url in str(refused.value)
            rows.pop(0)
    finally:
        server.close()


@pytest.mark.parametrize("adapter", ["http://10.1.2.3:18001", "https://adapter.example.com", "http://adapter.lan"])
async def test_an_agents_box_may_reach_the_adapter_only(service: ForeignBoxes, adapter: str) -> None:
    """By name or address, http or https: the probe of a run finds out if boxes get there."""
    provider = E2BProvider("e2b_x", service.url, service.url, adapter_url=adapter)
    await create(provider)
    await create(provider, network=False)
    host = adapter.partition("://")[2].partition(":")[0]
    open_box, closed_box = service.created[0], service.created[-1]
    assert open_box["network"] == {"allowOut": [host], "denyOut": ["0.0.0.0/0"]}
    assert closed_box["allow_internet_access"] is False and "network" not in closed_box
    await create(provider, network="open")
    assert service.created[-1]["allow_internet_access"] is True and "network" not in service.created[-1]


@served_by("", foreign_boxes.EMPTY_ANSWERS)
async def test_a_network_that_was_open_first_is_closed_by_new_rules(service: ForeignBoxes) -> None:
    provider = E2BProvider("e2b_x", service.url, service.url, adapter_url="http://10.1.2.3:18001")
    for then in (True, False):
        box = await provider.connect(await create(provider, network=OpenedFirst(then)))
        assert service.created[-1]["allow_internet_access"] is True and "network" not in service.created[-1]
        await box.set_network(then)
    assert service.networks == [{"allowOut": ["10.1.2.3"], "denyOut": ["0.0.0.0/0"]}, {"allow_internet_access": False}]


@served_by(foreign_boxes.NO_NETWORK_ROUTE, foreign_boxes.NO_NETWORK_ROUTE_TEXT)
async def test_a_service_that_cannot_close_a_network_has_no_lost_box(service: ForeignBoxes) -> None:
    """Another box would not help."""
    provider = service.provider()
    box = await provider.connect(await create(provider, network=OpenedFirst(False)))
    with pytest.raises(SandboxRefusesError, match=r"`sandbox\.network: pre_commands`") as refused:
        await box.set_network(False)
    assert f"PUT {service.url}/sandboxes/{box.id}/network" in str(refused.value)
    service.paused.add(box.id)
    with pytest.raises((SandboxGoneError, SandboxRefusesError), match="not found"):
        await box.set_network(False)
    service.boxes.clear()
    with pytest.raises(SandboxGoneError):
        await box.set_network(False)


def test_the_variables_of_the_sdk_say_where_the_service_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN", "E2B_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    assert E2BProvider("e2b_x").url == "https://api.e2b.app"
    monkeypatch.setenv("E2B_DOMAIN", "boxes.example.com")
    assert E2BProvider("e2b_x").url == "https://api.boxes.example.com"
    monkeypatch.setenv("E2B_API_URL", "http://10.0.0.5:3000")
    assert E2BProvider("e2b_x").url == "http://10.0.0.5:3000"
    monkeypatch.setenv("E2B_DEBUG", "true")
    with pytest.raises(ConfigError, match="E2B_DEBUG"):
        E2BProvider("e2b_x")


async def test_a_time_to_live_is_read_back(service: ForeignBoxes) -> None:
    provider = service.provider()
    info = await provider.describe(await create(provider))
    assert info.ends_at is not None and 590 < (info.ends_at - datetime.now(UTC)).total_seconds() <= 600


@served_by("", foreign_boxes.EMPTY_ANSWERS)
async def test_a_call_without_a_result_needs_no_content(service: ForeignBoxes) -> None:
    provider = service.provider()
    box = await provider.connect(await create(provider))
    await box.set_ttl(60)
    assert await provider.kill(box.id) and not await provider.kill(box.id)
