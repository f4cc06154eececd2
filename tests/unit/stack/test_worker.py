"""The sandbox provider that a worker uses."""

from pathlib import Path

import pytest

from activities.box_lifecycle import box_ttl_seconds
from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.temporal_settings import load_temporal_settings
from sandboxes.base import BoxLimits
from sandboxes.e2b import E2BProvider
from stack.parts import Stack
from stack.worker import slots


@pytest.mark.parametrize(("provider", "network", "parts"), [
    ("e2b", "", {"gateway"}), ("docker", "", {"egress"}), ("docker", "mine", set()), ("my_boxes:make", "", set()),
])  # fmt: skip
def test_the_stack_starts_what_the_boxes_need(
    provider: str, network: str, parts: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    monkeypatch.setenv("RATCHET_SANDBOX_PROVIDER", provider)
    monkeypatch.setenv("RATCHET_DOCKER_NETWORK", network)
    assert {part.name for part in Stack(tmp_path).parts()} & {"gateway", "egress"} == parts


async def test_limits_that_a_service_cannot_set_are_refused() -> None:
    provider = E2BProvider("e2b_x", "http://127.0.0.1:9", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="memory_mib"):
        await provider.create(
            "host", ttl_seconds=1, metadata={}, idempotency_key="x", limits=BoxLimits(memory_bytes=1 << 30)
        )


def test_boots_at_once_are_the_briefs_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_temporal_settings()
    assert slots("boot", before) == before.queues["boot"].slots
    monkeypatch.setenv("SWE_BOOT_CONCURRENCY", "6")
    assert slots("boot", load_temporal_settings()) == 6
    assert slots("boot", load_temporal_settings().model_copy(update={"boot_workers": 4})) == 1
    for wrong in ("0", "many", "-3"):
        monkeypatch.setenv("SWE_BOOT_CONCURRENCY", wrong)
        with pytest.raises(ConfigError, match="SWE_BOOT_CONCURRENCY"):
            load_temporal_settings()


def test_a_service_that_ends_boxes_too_early_is_refused() -> None:
    settings = load_temporal_settings()
    config = RunConfig.model_validate(
        {"datasets": [{"path": "x"}], "limits": {"agent_seconds": 3000, "eval_seconds": 600}}
    )
    assert box_ttl_seconds(config, settings, 86_400) == 3780 + settings.rollout.ttl_margin
    assert box_ttl_seconds(config, settings, 4000) == 4000
    with pytest.raises(ConfigError, match="3780 s"):
        box_ttl_seconds(config, settings, 3600)


@pytest.mark.parametrize(("public", "bound"), [
    ("", "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("10.1.2.3", "0.0.0.0"),
    ("head.cluster.internal", "0.0.0.0"), ("fd00::1", "::"), ("https://adapter.example.com", "127.0.0.1"),
])  # fmt: skip
def test_the_adapter_listens_where_boxes_call(
    public: str, bound: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ADAPTER_PUBLIC_HOST", public)
    monkeypatch.delenv("ADAPTER_BIND_HOST", raising=False)
    assert Stack(tmp_path).environment()["ADAPTER_BIND_HOST"] == bound
    monkeypatch.setenv("ADAPTER_BIND_HOST", "10.9.9.9")
    assert Stack(tmp_path).environment()["ADAPTER_BIND_HOST"] == "10.9.9.9"
