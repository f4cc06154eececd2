"""A real gateway, and a fixture that judges a patch in a fresh box by the same code as the stage `grade`."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from grading.judge_patch import GradingLimits, JudgedPatch, PatchJudge
from grading.registry import GRADERS
from grading.run_hidden_tests import UnusableBoxError
from ratchet.config import RunConfig
from ratchet.errors import MachineError
from sandbox_gateway import machine_probe
from sandbox_gateway.python_layer import PYTHON_LAYER_PATH, default_cache_directory, ensure_python_layer
from sandbox_gateway.settings import GatewaySettings
from sandboxes.base import Sandbox, SandboxProvider
from stack.ports import free_port
from store.tasks import TaskRow
from tests.integration.activities import shop
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess, provider_of

EVAL_SECONDS = 60.0


@pytest.fixture(scope="session")
def grading_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    try:
        machine_probe.require_sandbox_support()
    except MachineError as reason:
        pytest.skip(str(reason))
    settings = GatewaySettings(
        root_directory=tmp_path_factory.mktemp("grading"),
        api_key=API_KEY,
        port=free_port(),
        max_boxes=16,
        memory_bytes=512 << 20,
        max_processes=160,
        layers={PYTHON_LAYER_PATH: ensure_python_layer(default_cache_directory())},
    )
    gateway = GatewayProcess(settings)
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.kill_all_boxes()
        gateway.end()


@pytest.fixture
async def box(grading_gateway: GatewayProcess) -> AsyncIterator[Sandbox]:
    provider = provider_of(grading_gateway)
    async with await provider.create(
        "host", ttl_seconds=900, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
    ) as made:
        yield made


@pytest.fixture
async def second_box(grading_gateway: GatewayProcess) -> AsyncIterator[Sandbox]:
    provider = provider_of(grading_gateway)
    async with await provider.create(
        "host", ttl_seconds=900, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
    ) as made:
        yield made


FreshBox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Boots a box without network, which ends with the block."""


@pytest.fixture
def fresh_box(grading_gateway: GatewayProcess) -> FreshBox:
    return boxes_of(provider_of(grading_gateway))


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


def config(eval_seconds: float = EVAL_SECONDS, **grading: Any) -> RunConfig:
    limits = {"eval_seconds": eval_seconds, "workspace_seconds": 300}
    return RunConfig.model_validate({"datasets": [{"path": "unused"}], "grading": grading, "limits": limits})


async def judge_in_boxes(judge: PatchJudge, fresh_box: FreshBox, patch: bytes) -> JudgedPatch:
    """Judge a patch as a rollout does: in another box if the machine starved the tests of CPU, three times at most."""
    for left in (2, 1, 0):
        async with fresh_box() as box:
            try:
                return await judge.judge(box, patch)
            except UnusableBoxError:
                if not left:
                    raise
    raise AssertionError


Judge = Callable[..., Awaitable[JudgedPatch]]


@pytest.fixture
def judged(fresh_box: FreshBox) -> Judge:
    """Judge a patch on a task in a fresh box."""

    async def run(task: TaskRow, patch: bytes, **options: Any) -> JudgedPatch:
        limits = GradingLimits.of_run(config(**options))
        return await judge_in_boxes(PatchJudge(GRADERS[task.grader], task, limits), fresh_box, patch)

    return run


@pytest.fixture(scope="session")
def test_patch(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shop.hidden_patch(tmp_path_factory.mktemp("hidden"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return an empty directory for the patch's repository."""
    directory = tmp_path / "tree"
    directory.mkdir()
    return directory
