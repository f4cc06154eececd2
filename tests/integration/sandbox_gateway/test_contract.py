"""The sandbox contract over the unmodified SDK and the local gateway, and properties that only these two have."""

import asyncio
import uuid

import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError

from ratchet.errors import CommandFailedError, ConfigError, SandboxBusyError, SandboxGoneError, SandboxRefusesError
from sandboxes.base import Sandbox
from sandboxes.e2b import E2BProvider
from sandboxes.e2b_errors import cancellable
from sandboxes.registry import sandbox_provider
from stack.ports import free_port
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess, make_box, provider_of
from tests.integration.sandbox_gateway.contract import *  # noqa: F403


async def test_login_shell_keeps_the_path(box: Sandbox) -> None:
    path = (await box.exec("echo $PATH")).stdout.strip().split(":")
    assert path[0] == "/usr/local/sbin" and path[-1] == "/opt/ratchet/bin"
    assert (await box.exec("echo $PATH", env={"PATH": "/my/bin:/usr/bin"})).stdout == "/my/bin:/usr/bin\n"


async def test_an_unreachable_service_is_busy() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    nowhere = E2BProvider("e2b_x", url, url)
    with pytest.raises(SandboxBusyError):
        await make_box(nowhere)


async def test_a_full_gateway_is_busy(own_gateway: GatewayProcess, own_provider: E2BProvider) -> None:
    made = await asyncio.gather(*(make_box(own_provider) for _ in range(own_gateway.settings.max_boxes)))
    with pytest.raises(SandboxBusyError):
        await make_box(own_provider)
    await made[0].kill()
    await (await make_box(own_provider)).exec("true")


async def test_mistakes_of_the_caller_are_not_retried(provider: E2BProvider, gateway: GatewayProcess) -> None:
    with pytest.raises(ConfigError, match="not found"):
        await provider.create("no/such:image", ttl_seconds=5, metadata={}, idempotency_key=uuid.uuid4().hex)
    with pytest.raises(ConfigError):
        await provider.create("host", ttl_seconds=10**6, metadata={}, idempotency_key=uuid.uuid4().hex)
    with pytest.raises(SandboxRefusesError, match="API key"):  # keys expire while runs go on
        await make_box(E2BProvider("wrong", gateway.url, gateway.url))


async def test_an_image_by_template(gateway: GatewayProcess) -> None:
    """For services that route no metadata, the task's image names the template."""
    by_template = E2BProvider(
        API_KEY, gateway.url, gateway.url, image_metadata_key="unknown-to-this-service", template="{image}"
    )
    async with await make_box(by_template) as box:
        await box.exec("true")
        assert gateway.call("GET", f"/sandboxes/{box.id}").json()["templateID"] == "host"
    with pytest.raises(ConfigError, match="no/such:image"):
        await by_template.create("no/such:image", ttl_seconds=5, metadata={}, idempotency_key=uuid.uuid4().hex)


async def test_a_workers_environment_says_how_the_service_is_told_the_image(
    own_gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_gateway.end()
    own_gateway.settings = own_gateway.settings.model_copy(update={"image_metadata_key": "our/image"})
    own_gateway.start()
    for name, value in (
        ("E2B_API_KEY", API_KEY),
        ("E2B_API_URL", own_gateway.url),
        ("E2B_SANDBOX_URL", own_gateway.url),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "our/image")
    monkeypatch.setenv("RATCHET_SANDBOX_TEMPLATE", "no-such-template")  # unused if the metadata key is known
    async with await make_box(sandbox_provider()) as box:
        facts = own_gateway.call("GET", f"/sandboxes/{box.id}").json()
    assert (facts["templateID"], facts["metadata"]["our/image"]) == ("host", "host")
    monkeypatch.setenv("VIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "another")
    with pytest.raises(ConfigError, match="no-such-template"):
        await make_box(sandbox_provider())


async def test_a_second_client_connects(provider: E2BProvider, gateway: GatewayProcess, box: Sandbox) -> None:
    await box.exec("echo shared > /workspace/x")
    other = await provider_of(gateway).connect(box.id)
    assert await other.read_file("/workspace/x") == b"shared\n"
    await other.close()
    assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_pause_and_resume(provider: E2BProvider, gateway: GatewayProcess, box: Sandbox) -> None:
    if gateway.call("POST", f"/sandboxes/{box.id}/pause", json={}).status_code != 204:
        pytest.skip("this machine's control groups have no freezer")
    with pytest.raises(SandboxGoneError):
        await box.exec("true")
    assert gateway.call("POST", f"/sandboxes/{box.id}/pause", json={}).status_code == 409
    resumed = await provider.connect(box.id)
    assert (await resumed.exec("echo back")).stdout == "back\n"


@pytest.mark.parametrize("swallowed", [True, False])
async def test_a_cancellation_that_the_sdk_swallows_is_one_all_the_same(swallowed: bool) -> None:
    """The SDK's transport turns a cancellation into an error, and its command handle drops that if the answer arrives
    at the same time.
    """

    async def call() -> None:
        with cancellable():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not swallowed:
                    raise ConnectError(Code.CANCELED, "Request was cancelled") from None

    running = asyncio.create_task(call())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_machines_programs_are_read_only(box: Sandbox) -> None:
    with pytest.raises(CommandFailedError):
        await box.write_file("/usr/bin/true", b"not writable")


async def test_su_changes_down_and_not_up(box: Sandbox) -> None:
    assert (await box.exec("su agent -c true 2>/dev/null", user="agent", check=False)).exit_code != 0
    assert (await box.exec("su agent -c 'id -un'")).stdout == "agent\n"
