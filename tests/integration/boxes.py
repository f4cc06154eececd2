"""Fresh boxes of one real gateway, which the tests of stages, graders and providers share."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from ratchet import paths
from ratchet.errors import MachineError
from sandbox_gateway import machine_probe
from sandbox_gateway.python_layer import PYTHON_LAYER_PATH, ensure_python_layer
from sandbox_gateway.settings import GatewaySettings
from sandboxes.base import Sandbox, SandboxProvider
from stack.ports import free_port
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess, provider_of


@pytest.fixture(scope="session")
def box_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    try:
        machine_probe.require_sandbox_support()
    except MachineError as reason:
        pytest.skip(str(reason))
    settings = GatewaySettings(
        root_directory=tmp_path_factory.mktemp("boxes"),
        api_key=API_KEY,
        port=free_port(),
        max_boxes=16,
        memory_bytes=512 << 20,
        max_processes=160,
        layers={PYTHON_LAYER_PATH: ensure_python_layer(paths.cache())},
    )
    gateway = GatewayProcess(settings)
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.kill_all_boxes()
        gateway.end()


@pytest.fixture
async def box(box_gateway: GatewayProcess) -> AsyncIterator[Sandbox]:
    provider = provider_of(box_gateway)
    async with await provider.create(
        "host", ttl_seconds=900, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
    ) as made:
        yield made


@pytest.fixture
async def second_box(box_gateway: GatewayProcess) -> AsyncIterator[Sandbox]:
    provider = provider_of(box_gateway)
    async with await provider.create(
        "host", ttl_seconds=900, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
    ) as made:
        yield made


FreshBox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Boots a box without network, which ends with the block."""


@pytest.fixture
def fresh_box(box_gateway: GatewayProcess) -> FreshBox:
    return boxes_of(provider_of(box_gateway))


def boxes_of(provider: SandboxProvider) -> FreshBox:
    """Return what boots boxes of a provider."""

    @asynccontextmanager
    async def made() -> AsyncIterator[Sandbox]:
        async with await provider.create(
            "host", ttl_seconds=900, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
        ) as box:
            try:
                yield box
            finally:
                await box.kill()

    return made
