"""`ratchet doctor` asks only for what the chosen provider of boxes needs."""

from pathlib import Path

import pytest

from cli.doctor import _checks, _huge_pages_check, _sandbox_checks
from stack.huge_pages import kernel_setting
from stack.parts import Stack
from tests.standins.foreign_boxes import serving_foreign_boxes


def test_doctor_answers_before_anything_is_set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "not" / "made"))
    (disk,) = [check for check in _checks() if check["what"] == "disk"]
    assert disk["ok"] and "GiB free" in disk["detail"] and not (tmp_path / "not").exists()


def test_doctor_names_the_setting_of_huge_pages() -> None:
    check = _huge_pages_check()
    assert not check["needed"] and (kernel_setting() or "none") in check["detail"]


@pytest.mark.parametrize(("provider", "key", "expected"), [
    ("", "", "bubblewrap"), ("e2b", "e2b_" + "0" * 40, "boxes of e2b"), ("my_boxes:make", "", "boxes of my_boxes:make"),
    ("docker", "", "boxes of docker"),
])  # fmt: skip
def test_doctor_asks_for_what_the_provider_needs(
    provider: str, key: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("RATCHET_SANDBOX_PROVIDER", provider), ("E2B_API_KEY", key)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    checks = _sandbox_checks(Stack(tmp_path))
    assert checks[0]["what"] == expected
    assert len(checks) == 1 or not provider, "nothing of the local gateway is asked for"
    assert not provider or not checks[0]["ok"], "nothing answers there"
    if provider == "docker":
        assert not checks[0]["ok"] and "RATCHET_SANDBOX_PROVIDER=docker" in checks[0]["detail"]


def test_doctor_asks_a_service_for_its_boxes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RATCHET_SANDBOX_PROVIDER", raising=False)
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    monkeypatch.setenv("RATCHET_SANDBOX_OPEN_NETWORK", "1")
    with serving_foreign_boxes() as service:
        monkeypatch.setenv("E2B_API_URL", service.url)
        (check,) = _sandbox_checks(Stack(tmp_path))
    assert check["ok"] and service.url in check["detail"] and "reaches more than the adapter" in check["detail"]
