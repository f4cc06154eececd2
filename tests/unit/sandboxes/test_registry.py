"""The sandbox provider that a worker uses."""

from pathlib import Path

import pytest

from ratchet.errors import ConfigError
from sandboxes.docker import DockerProvider
from sandboxes.e2b import E2BProvider
from sandboxes.registry import adapter_url, sandbox_provider


def test_the_environment_chooses_the_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_x")
    monkeypatch.delenv("RATCHET_SANDBOX_PROVIDER", raising=False)
    assert isinstance(sandbox_provider(), E2BProvider)
    monkeypatch.setenv("RATCHET_SANDBOX_PROVIDER", "docker")
    assert isinstance(sandbox_provider(), DockerProvider)
    for wrong in ("podman", "no.such.module:make", f"{__name__}:no_such_function"):
        monkeypatch.setenv("RATCHET_SANDBOX_PROVIDER", wrong)
        with pytest.raises(ConfigError, match=wrong):
            sandbox_provider()


def make_own_provider() -> DockerProvider:
    return DockerProvider(max_ttl_seconds=1234)


def test_a_service_of_the_users_own_by_its_import_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_boxes.py").write_text("from tests.unit.sandboxes.test_registry import make_own_provider as make\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RATCHET_SANDBOX_PROVIDER", "my_boxes:make")
    assert sandbox_provider().capabilities.max_ttl_seconds == 1234


def test_the_adapter_as_a_box_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without a network reaches the adapter on its own loopback, wherever the adapter runs."""
    monkeypatch.setenv("ADAPTER_PUBLIC_HOST", "10.1.2.3")
    monkeypatch.setenv("ADAPTER_PORT", "1800")
    for provider, network, url in (
        ("e2b", "", "10.1.2.3"),
        ("docker", "", "127.0.0.1"),
        ("docker", "mine", "10.1.2.3"),
    ):
        monkeypatch.setenv("RATCHET_SANDBOX_PROVIDER", provider)
        monkeypatch.setenv("RATCHET_DOCKER_NETWORK", network)
        assert adapter_url() == f"http://{url}:1800"
    monkeypatch.setenv("ADAPTER_PUBLIC_HOST", "https://adapter.example.com/")
    assert adapter_url() == "https://adapter.example.com"
