"""Which sandbox service a worker uses."""

import pytest

from activities.sandboxes.docker import DockerProvider
from activities.sandboxes.e2b import E2BProvider
from ratchet.errors import ConfigError
from ratchet.worker import sandbox_provider


def test_the_environment_chooses_the_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_x")
    monkeypatch.delenv("RATCHET_SANDBOX_PROVIDER", raising=False)
    assert isinstance(sandbox_provider(), E2BProvider)
    monkeypatch.setenv("RATCHET_SANDBOX_PROVIDER", "docker")
    assert isinstance(sandbox_provider(), DockerProvider)
    monkeypatch.setenv("RATCHET_SANDBOX_PROVIDER", "podman")
    with pytest.raises(ConfigError, match="podman"):
        sandbox_provider()
