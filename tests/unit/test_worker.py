"""Which sandbox service a worker uses."""

import pytest

from activities.run_configs import RunConfigs
from activities.sandboxes.docker import DockerProvider
from activities.sandboxes.e2b import E2BProvider
from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.store.database import Database
from ratchet.temporal_settings import load_temporal_settings
from ratchet.worker import sandbox_provider, slots


def test_the_environment_chooses_the_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_x")
    monkeypatch.delenv("RATCHET_SANDBOX_PROVIDER", raising=False)
    assert isinstance(sandbox_provider(), E2BProvider)
    monkeypatch.setenv("RATCHET_SANDBOX_PROVIDER", "docker")
    assert isinstance(sandbox_provider(), DockerProvider)
    monkeypatch.setenv("RATCHET_SANDBOX_PROVIDER", "podman")
    with pytest.raises(ConfigError, match="podman"):
        sandbox_provider()


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
    configs = RunConfigs(Database("postgresql://nowhere/x", pool_size=1), settings)
    config = RunConfig.model_validate({"datasets": [{"path": "x"}], "limits": {"agent_seconds": 3000, "eval_seconds": 600}})
    assert configs.ttl_seconds(config, 86_400) == 3780 + settings.rollout.ttl_margin
    assert configs.ttl_seconds(config, 4000) == 4000
    with pytest.raises(ConfigError, match="3780 s"):
        configs.ttl_seconds(config, 3600)
