"""A front of two real gateways: the whole sandbox contract, and what only several hosts have.

What a real gateway cannot be made to do, a scripted one does.
"""

import asyncio
import contextlib
import json
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import AsyncSandbox

from ratchet.errors import ConfigError, SandboxBusyError, SandboxFullError, SandboxGoneError, SandboxRefusesError
from ratchet.temporal_settings import load_temporal_settings
from sandbox_gateway.front import host_tag
from sandbox_gateway.image_store import ImageStore
from sandbox_gateway.settings import SILENT_HOSTS, GatewaySettings
from sandboxes.base import Sandbox
from sandboxes.e2b import E2BProvider
from sandboxes.e2b_control_plane import ControlPlane
from stack.parts import BOX_HOSTS_FILE, Stack
from stack.ports import free_port
from stack.probes import Probes
from tests.integration.sandbox_gateway.conftest import (
    API_KEY,
    DEADLINE_SECONDS,
    FrontProcess,
    GatewayProcess,
    eventually,
    make_box,
    provider_of,
    running,
)
from tests.integration.sandbox_gateway.contract import *  # noqa: F403
from tests.integration.sandbox_gateway.image_files import make_tree

LOST_SECONDS = 3.0


@dataclass
class Hosts:
    """Gateways by name, and their front. `made`: running gateways' generators, by name."""

    directory: Path
    make_settings: Callable[[Path], GatewaySettings]
    front: FrontProcess
    gateways: dict[str, GatewayProcess] = field(default_factory=dict)
    made: list[Iterator[GatewayProcess]] = field(default_factory=list)

    def add(self, name: str, **changes: Any) -> None:
        """Start a gateway and name it in the front's file."""
        values = {"box_id_prefix": host_tag(name), "images_directory": self.directory / f"{name}-images", **changes}
        settings = self.make_settings(self.directory / name).model_copy(update=values)
        self.made.append(running(settings))
        self.gateways[name] = next(self.made[-1])
        urls = {name: gateway.url for name, gateway in self.gateways.items()}
        fresh = self.front.hosts_file.with_suffix(".new")
        fresh.write_text(json.dumps(urls))
        fresh.replace(self.front.hosts_file)

    async def know(self, *names: str) -> None:
        """Wait until exactly these hosts are asked for new boxes."""

        async def known() -> bool:
            found = set()
            with contextlib.suppress(SandboxBusyError):
                for _ in range(5 * len(self.gateways)):
                    async with await make_box(provider_of(self.front)) as box:
                        found.add(self.of(box))
            return found == set(names)

        await eventually(known)

    def of(self, box: Sandbox) -> str:
        (name,) = (name for name in self.gateways if box.id.startswith(f"i{host_tag(name)}"))
        return name

    def own(self, name: str) -> set[str]:
        """Return the ids of the boxes of one gateway, as it lists them."""
        return {row["sandboxID"] for row in self.gateways[name].call("GET", "/v2/sandboxes").json()}

    def end(self) -> None:
        for made in self.made:
            next(made, None)


def serving(
    directory: Path, make_settings: Callable[[Path], GatewaySettings], lost_seconds: float = 600.0, **changes: Any
) -> Iterator[Hosts]:
    directory.mkdir(exist_ok=True)
    front = FrontProcess(free_port(), directory / "hosts.json", lost_seconds)
    hosts = Hosts(directory, make_settings, front)
    try:
        hosts.add("one", **changes)
        hosts.add("two", **changes)
        front.start()
        yield hosts
    finally:
        hosts.end()
        front.end()


@pytest.fixture(scope="module")
def hosts(
    make_settings: Callable[[Path], GatewaySettings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    """Two hosts for tests that leave them running."""
    yield from serving(tmp_path_factory.mktemp("hosts"), make_settings)


@pytest.fixture
def own_hosts(make_settings: Callable[[Path], GatewaySettings], tmp_path: Path) -> Iterator[Hosts]:
    yield from serving(tmp_path, make_settings)


@pytest.fixture
def small_hosts(make_settings: Callable[[Path], GatewaySettings], tmp_path: Path) -> Iterator[Hosts]:
    yield from serving(tmp_path, make_settings, max_boxes=2)


@pytest.fixture
def short_hosts(make_settings: Callable[[Path], GatewaySettings], tmp_path: Path) -> Iterator[Hosts]:
    yield from serving(tmp_path, make_settings, LOST_SECONDS)


@pytest.fixture
async def provider(hosts: Hosts) -> E2BProvider:
    await hosts.know("one", "two")
    return provider_of(hosts.front)


@pytest.fixture
async def box(provider: E2BProvider) -> AsyncIterator[Sandbox]:
    async with await make_box(provider) as made:
        yield made


class ScriptedGateway:
    """A gateway that reads only the head of each call, and answers with `statuses` by method, 204 if there is none."""

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.held: set[str] = set()
        """Methods, or paths, of calls that get no answer."""
        self.calls: list[str] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            method, path = (await reader.readuntil(b"\r\n\r\n")).decode().split()[:2]
            self.calls.append(f"{method} {path}")
            if self.held & {method, path}:
                await reader.read()  # until the other end closes
                return
            status = 204 if path == "/health" else self.statuses.get(method, 204)
            writer.write(f"HTTP/1.1 {status} Scripted\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())


@dataclass
class ScriptedHosts:
    front: FrontProcess
    one: ScriptedGateway
    two: ScriptedGateway

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return await asyncio.to_thread(self.front.call, method, path, **options)

    async def create(self, key: str | None = None) -> int:
        headers = {"Idempotency-Key": key} if key is not None else {}
        return (await self.call("POST", "/v2/sandboxes", headers=headers, content=b"{}")).status_code


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[ScriptedHosts]:
    """Two scripted hosts that are ready."""
    front, made = FrontProcess(free_port(), tmp_path / "hosts.json", 600.0), [ScriptedGateway(), ScriptedGateway()]
    async with contextlib.AsyncExitStack() as ended:
        for gateway in made:
            server = await asyncio.start_server(gateway.answer, "127.0.0.1")
            ended.callback(server.close)
            gateway.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        front.hosts_file.write_text(json.dumps({"one": made[0].url, "two": made[1].url}))
        front.start()
        ended.callback(front.end)

        async def is_ready() -> bool:
            codes = [(await asyncio.to_thread(front.call, "GET", path_of(name))).status_code for name in ("one", "two")]
            return codes == [204, 204]

        await eventually(is_ready)
        yield ScriptedHosts(front, *made)


def path_of(name: str) -> str:
    """Return the path of a box on a host."""
    return f"/sandboxes/i{host_tag(name)}{'a' * 14}"


async def box_on(hosts: Hosts, name: str) -> Sandbox:
    while True:
        made = await make_box(provider_of(hosts.front))
        if hosts.of(made) == name:
            return made
        await made.kill()


async def test_boxes_are_on_both_hosts_and_in_one_list(small_hosts: Hosts) -> None:
    provider = provider_of(small_hosts.front)
    await small_hosts.know("one", "two")
    boxes = await asyncio.gather(*(make_box(provider) for _ in range(4)))
    ids = {box.id for box in boxes}
    assert small_hosts.own("one") | small_hosts.own("two") == ids
    assert len(small_hosts.own("one")) == len(small_hosts.own("two")) == 2
    assert {info.id for info in await provider.list({"owner": "test"})} == ids
    assert await provider.list({"owner": "other"}) == []
    starts = [row["startedAt"] for row in small_hosts.front.call("GET", "/sandboxes", params={"limit": 1}).json()]
    assert len(starts) == 4 and starts == sorted(starts, reverse=True)


async def test_a_full_host_sends_boxes_to_the_next_one(small_hosts: Hosts) -> None:
    provider = provider_of(small_hosts.front)
    await small_hosts.know("one", "two")
    boxes = [await make_box(provider) for _ in range(4)]
    with pytest.raises(SandboxFullError):
        await make_box(provider)
    victim = next(box for box in boxes if small_hosts.of(box) == "one")
    await victim.kill()
    assert small_hosts.of(await make_box(provider)) == "one"


async def test_a_key_is_one_box_although_the_first_host_has_room_again(small_hosts: Hosts) -> None:
    provider, key = provider_of(small_hosts.front), uuid.uuid4().hex
    await small_hosts.know("one", "two")
    made = await asyncio.gather(make_box(provider, key), make_box(provider, key))
    assert made[0].id == made[1].id == (await make_box(provider, key)).id
    small_hosts.front.end(signal.SIGKILL)
    small_hosts.front.start()
    await small_hosts.know("one", "two")
    assert (await make_box(provider, key)).id == made[0].id
    host = small_hosts.of(made[0])
    while len(small_hosts.own(host)) < 2:
        other = await make_box(provider)
        if small_hosts.of(other) != host:
            await other.kill()
    full = await make_box(provider, key := uuid.uuid4().hex)
    assert small_hosts.of(full) != host
    await other.kill()
    for _ in range(8):
        assert (await make_box(provider, key)).id == full.id


async def test_a_killed_gateway_is_an_outage_of_its_boxes_only(own_hosts: Hosts) -> None:
    provider = provider_of(own_hosts.front)
    await own_hosts.know("one", "two")
    away, here = await box_on(own_hosts, "one"), await box_on(own_hosts, "two")
    await away.write_file("/workspace/kept", "kept")
    running = asyncio.create_task(here.exec("sleep 3; echo through", timeout=60))
    own_hosts.gateways["one"].end(signal.SIGKILL)
    with pytest.raises(SandboxBusyError, match="does not answer"):
        await away.set_ttl(600)
    with pytest.raises(SandboxBusyError):
        await away.exec("true")
    with pytest.raises(SandboxBusyError):
        await provider.kill(away.id)
    await own_hosts.know("two")
    assert (await running).stdout == "through\n"
    assert [info.id for info in await provider.list({})] == [here.id]
    listed = own_hosts.front.call("GET", "/v2/sandboxes")
    assert listed.headers[SILENT_HOSTS] == "one"
    pages = AsyncSandbox.list(api_key=API_KEY, api_url=own_hosts.front.url)
    assert [info.sandbox_id for info in await pages.next_items()] == [here.id] and not pages.has_next
    with pytest.raises(SandboxBusyError, match="lacks those of one"):
        await ControlPlane({"api_key": API_KEY, "api_url": own_hosts.front.url}).rows({}, whole=True)
    with pytest.raises(SandboxBusyError):
        await provider.describe(away.id)
    own_hosts.gateways["one"].start()

    async def is_back() -> bool:
        try:
            return await away.read_file("/workspace/kept") == b"kept"
        except SandboxBusyError:
            return False

    await eventually(is_back)
    await own_hosts.know("one", "two")
    assert {info.id for info in await provider.list({})} == {away.id, here.id}
    await away.kill()


async def test_each_gateway_behind_the_front_is_probed_alone(
    own_hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(tmp_path / "stack")
    stack.home.mkdir()
    (stack.home / "box_host.key").write_text(API_KEY)
    (stack.home / BOX_HOSTS_FILE).symlink_to(own_hosts.front.hosts_file)
    url = own_hosts.front.url
    for name, value in {"E2B_API_KEY": API_KEY, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}.items():
        monkeypatch.setenv(name, value)
    await own_hosts.know("one", "two")
    one, two = (f"gateway {name} i{host_tag(name)}" for name in ("one", "two"))
    probes = Probes(stack, load_temporal_settings(), lambda name: None)

    async def found(part: str) -> str:
        probe = probes.of(part)
        assert probe is not None
        return await probe()

    box = await box_on(own_hosts, "one")
    assert [await found(part) for part in (one, two, "gateway")] == ["1 boxes", "0 boxes", "1 boxes"]
    assert box.id.startswith(one.split()[2])
    own_hosts.gateways["one"].end(signal.SIGKILL)
    with pytest.raises(SandboxBusyError):
        await found(one)
    await own_hosts.know("two")
    assert [await found(part) for part in (two, "gateway")] == ["0 boxes", "0 boxes"]
    own_hosts.gateways["one"].start()
    await own_hosts.know("one", "two")


async def test_the_boxes_of_a_lost_host_are_gone(short_hosts: Hosts) -> None:
    provider = provider_of(short_hosts.front)
    await short_hosts.know("one", "two")
    away = await box_on(short_hosts, "one")
    short_hosts.gateways["one"].end(signal.SIGKILL)
    ended_at = time.monotonic()

    async def is_gone() -> bool:
        try:
            await provider.describe(away.id)
        except SandboxGoneError:
            return True
        except SandboxBusyError:
            return False
        return False

    await eventually(is_gone)
    assert time.monotonic() - ended_at >= LOST_SECONDS - 1
    with pytest.raises(SandboxGoneError):
        await away.exec("true")
    assert not await provider.kill(away.id)
    assert await provider.list({}) == []
    short_hosts.gateways["one"].start()
    await short_hosts.know("one", "two")
    assert await provider.kill(away.id), "it is alive and known again, so that a sweep ends it"


async def test_a_front_that_starts_anew_takes_no_host_for_lost(own_hosts: Hosts) -> None:
    provider = provider_of(own_hosts.front)
    away = await box_on(own_hosts, "one")
    own_hosts.gateways["one"].end(signal.SIGKILL)
    own_hosts.front.end(signal.SIGKILL)
    own_hosts.front.start()
    await own_hosts.know("two")
    with pytest.raises(SandboxBusyError):
        await provider.describe(away.id)
    own_hosts.gateways["one"].start()
    await own_hosts.know("one", "two")
    assert (await provider.describe(away.id)).id == away.id


async def test_a_host_that_is_added_gets_boxes(own_hosts: Hosts) -> None:
    own_hosts.add("three")
    await own_hosts.know("one", "two", "three")


async def test_without_a_host_that_answers_boots_wait(tmp_path: Path) -> None:
    front = FrontProcess(free_port(), tmp_path / "hosts.json", 600.0)
    front.start()
    provider, box_id = provider_of(front), f"i{host_tag('one')}{'a' * 14}"
    try:
        with pytest.raises(SandboxBusyError):
            await make_box(provider)
        for call in (provider.list({}), provider.describe(box_id), provider.connect(box_id), provider.kill(box_id)):
            with pytest.raises(SandboxBusyError, match="has not been read yet"):
                await call
        front.hosts_file.write_text("{}")

        async def is_read() -> bool:
            try:
                await provider.list({})
            except SandboxBusyError as error:
                return "no host" in str(error)
            return False

        await eventually(is_read)
        with pytest.raises(SandboxGoneError):
            await provider.describe(box_id)
    finally:
        front.end()


async def test_an_image_that_a_silent_host_may_have_is_not_unknown(own_hosts: Hosts) -> None:
    provider = provider_of(own_hosts.front)
    await own_hosts.know("one", "two")
    own_hosts.gateways["one"].end(signal.SIGKILL)
    await own_hosts.know("two")
    with pytest.raises(SandboxBusyError, match="host one does not answer"):
        await provider.create("no/such:image", ttl_seconds=5, metadata={}, idempotency_key=uuid.uuid4().hex)


async def test_an_image_in_a_shared_directory_is_imported_once_for_all_hosts(
    make_settings: Callable[[Path], GatewaySettings], tmp_path: Path
) -> None:
    """Also while gateways make boxes of it; without the shared directory its boxes are on the host that has it."""
    directories = {"shared": tmp_path / "images", "own": tmp_path / "own" / "one-images"}
    for name, directory in directories.items():
        changes = {"images_directory": directory} if name == "shared" else {}
        made = serving(tmp_path / name, make_settings, **changes)
        hosts = next(made)
        try:
            await hosts.know("one", "two")
            key = uuid.uuid4().hex
            with pytest.raises(ConfigError, match="small"):
                await create_small(hosts, key)
            tree = make_tree(tmp_path / f"tree-{name}")
            imports = (asyncio.to_thread(ImageStore(directory).add, tree, "small", print) for _ in range(3))
            assert len({image.digest for image in await asyncio.gather(*imports)}) == 1
            assert len([*directory.glob("sha256-*")]) == 1 and not [*directory.glob(".new-*")]
            found = set()
            for number in range(20):
                async with await create_small(hosts, f"{key} {number}") as box:
                    assert (await box.exec("cat /srv/from-image")).stdout == "image\n"
                    found.add(hosts.of(box))
            assert found == ({"one", "two"} if name == "shared" else {"one"})
        finally:
            next(made, None)


async def create_small(hosts: Hosts, key: str) -> Sandbox:
    return await provider_of(hosts.front).create(
        "small", ttl_seconds=300, metadata={}, idempotency_key=key, network=False
    )


async def test_a_key_waits_for_the_host_of_its_box(own_hosts: Hosts) -> None:
    provider = provider_of(own_hosts.front)
    await own_hosts.know("one", "two")
    keys = [uuid.uuid4().hex for _ in range(6)]
    boxes = {key: await make_box(provider, key) for key in keys}
    own_hosts.gateways["one"].end(signal.SIGKILL)
    await own_hosts.know("two")
    for key, box in boxes.items():
        if own_hosts.of(box) == "one":
            with pytest.raises(SandboxBusyError, match="host one does not answer"):
                await make_box(provider, key)
        else:
            assert (await make_box(provider, key)).id == box.id
    own_hosts.gateways["one"].start()
    await own_hosts.know("one", "two")
    assert [(await make_box(provider, key)).id for key in keys] == [box.id for box in boxes.values()]


async def test_a_key_goes_to_no_other_host_while_its_own_cannot_reach_its_boxes(scripted: ScriptedHosts) -> None:
    for key in map(str, range(8)):
        scripted.one.statuses = scripted.two.statuses = {"POST": 201}
        before = len(scripted.one.calls), len(scripted.two.calls)
        assert await scripted.create(key) == 201
        is_first = "POST /v2/sandboxes" in scripted.one.calls[before[0] :]
        own, other = (scripted.one, scripted.two) if is_first else (scripted.two, scripted.one)
        own.statuses = {"POST": 504}
        num_calls = len(other.calls)
        assert await scripted.create(key) == 504
        assert "POST /v2/sandboxes" not in other.calls[num_calls:]
        own.statuses = {"POST": 503}
        assert await scripted.create(key) == 201, "the host has no room, and so not the box"
        own.statuses = {"POST": 504}
        assert await scripted.create(f"{key} is new") == 201


async def test_a_boot_under_way_ends_when_its_host_falls_silent(scripted: ScriptedHosts) -> None:
    """It would take the place of a boot on another host until the host is lost."""
    scripted.two.statuses = {"POST": 503}
    scripted.one.held = {"POST", "/health"}
    began = time.monotonic()
    assert await scripted.create() == 504
    assert time.monotonic() - began < DEADLINE_SECONDS / 2
    scripted.two.statuses = {"POST": 201}
    assert [await scripted.create() for _ in range(4)] == [201] * 4


async def test_boxes_without_a_key_are_spread(scripted: ScriptedHosts) -> None:
    scripted.one.statuses = scripted.two.statuses = {"POST": 201}
    assert [await scripted.create() for _ in range(30)] == [201] * 30
    assert all("POST /v2/sandboxes" in gateway.calls for gateway in (scripted.one, scripted.two))


async def test_a_host_that_hangs_delays_no_look_at_another(scripted: ScriptedHosts) -> None:
    scripted.one.held = {"/health"}
    before = scripted.one.calls.count("GET /health"), scripted.two.calls.count("GET /health")

    async def is_looked_at() -> bool:
        return scripted.two.calls.count("GET /health") >= before[1] + 4

    await eventually(is_looked_at)
    assert scripted.one.calls.count("GET /health") <= before[0] + 2, "one look that waits, and one before it"


async def test_a_listing_leaves_out_a_host_that_fails_to_list(scripted: ScriptedHosts) -> None:
    for status in (503, 504):
        scripted.one.statuses = scripted.two.statuses = {"GET": status}
        assert (await scripted.call("GET", "/v2/sandboxes")).status_code == 504, "no host knows its boxes"
    scripted.one.statuses = {"GET": 401}
    assert (await scripted.call("GET", "/v2/sandboxes")).status_code == 401


async def test_many_boots_that_wait_delay_no_look_and_no_further_boot(scripted: ScriptedHosts) -> None:
    scripted.one.held = scripted.two.held = {"POST"}
    boots = 2 * 100 + 2  # httpx's own limit is 100
    async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None), timeout=120) as http:
        calls = [
            asyncio.create_task(http.post(f"{scripted.front.url}/v2/sandboxes", content=b"{}")) for _ in range(boots)
        ]

        def num_calls(call: str) -> int:
            return scripted.one.calls.count(call) + scripted.two.calls.count(call)

        async def all_wait() -> bool:
            return num_calls("POST /v2/sandboxes") == boots

        await eventually(all_wait)
        before = num_calls("GET /health")

        async def is_looked_at() -> bool:
            return num_calls("GET /health") >= before + 4

        await eventually(is_looked_at)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_an_answer_that_cannot_be_read_is_a_failure_in_the_form_of_the_protocol(scripted: ScriptedHosts) -> None:
    scripted.one.statuses = {"GET": 200}
    reply = await scripted.call("GET", "/v2/sandboxes")
    assert reply.status_code == 500 and "the gateway failed" in reply.json()["message"]


async def test_pause_metrics_and_ports_of_a_box(provider: E2BProvider, hosts: Hosts) -> None:
    for name in ("one", "two"):
        async with await box_on(hosts, name) as box:
            await box.exec("mkdir -p /tmp/www && echo hello >/tmp/www/index.html")
            await box.exec("cd /tmp/www && nohup /opt/ratchet/bin/python3 -m http.server 8000 >/dev/null 2>&1 &")

            async def served(box: Sandbox = box) -> bool:
                headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}
                reply = httpx.get(hosts.front.url, headers=headers, trust_env=False)
                by_name = httpx.get(hosts.front.url, headers={"Host": f"8000-{box.id}.localhost"}, trust_env=False)
                return reply.text == by_name.text == "hello\n"

            await eventually(served)
            headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000", "Connection": "upgrade"}
            upgraded = httpx.get(hosts.front.url, headers={**headers, "Upgrade": "websocket"}, trust_env=False)
            assert upgraded.status_code == 501
            assert hosts.front.call("GET", f"/sandboxes/{box.id}/metrics").json()[0]["memTotal"] > 0
            assert hosts.front.call("POST", f"/sandboxes/{box.id}/pause").status_code == 204
            assert (await provider.describe(box.id)).state == "paused"
            assert await (await provider.connect(box.id)).exec("echo on")
            assert (await provider.describe(box.id)).state == "running"


async def test_a_refusal_that_comes_before_the_body_is_read_reaches_the_client(
    provider: E2BProvider, box: Sandbox, hosts: Hosts
) -> None:
    headers = {"E2b-Sandbox-Id": box.id, "X-Access-Token": "wrong"}
    for url in (hosts.front.url, hosts.gateways[hosts.of(box)].url):
        for _ in range(3):
            body = bytes(32 << 20)
            reply = await asyncio.to_thread(
                httpx.post, f"{url}/files", headers=headers, content=body, trust_env=False, timeout=60
            )
            assert reply.status_code == reply.json()["code"] == 401, reply.text


async def test_what_is_refused(provider: E2BProvider, hosts: Hosts) -> None:
    with pytest.raises(ConfigError, match="no/such:image"):
        await provider.create("no/such:image", ttl_seconds=5, metadata={}, idempotency_key=uuid.uuid4().hex)
    with pytest.raises(ConfigError, match="timeout"):
        await provider.create("host", ttl_seconds=10**6, metadata={}, idempotency_key=uuid.uuid4().hex)
    for bad in ("nothing", "i", f"i{host_tag('one')}{'a' * 14}", "izzzz" + "a" * 16):
        with pytest.raises(SandboxGoneError):
            await provider.describe(bad)
    with pytest.raises(SandboxRefusesError):
        await make_box(E2BProvider("wrong", hosts.front.url, hosts.front.url))
    with pytest.raises(SandboxRefusesError):
        await E2BProvider("wrong", hosts.front.url, hosts.front.url).list({})
    assert hosts.front.call("POST", "/v2/sandboxes", content=b"no JSON").status_code == 400
    assert hosts.front.call("GET", "/no/such/route").status_code == 404
    signed = httpx.get(f"{hosts.front.url}/files", params={"path": "/etc/passwd", "signature": "v1_x"}, trust_env=False)
    assert signed.status_code == 404 and "E2b-Sandbox-Id" in signed.json()["message"]
