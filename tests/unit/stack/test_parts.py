"""Links that commands print lead to the Temporal UI that the user has, and to the namespace that is used."""

from pathlib import Path

import pytest

from cli.view import viewer_settings
from stack.parts import PREFERRED_PORTS, Stack


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE", "RATCHET_TEMPORAL_UI", "RATCHET_VIEWER_HOST"):
        monkeypatch.delenv(name, raising=False)
    return Stack(tmp_path)


def test_the_stacks_own_ui(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    port = stack.ports["temporal_ui"]
    assert stack.workflow_page("run/a") == f"http://127.0.0.1:{port}/namespaces/default/workflows/run%2Fa"
    assert f"Temporal UI http://127.0.0.1:{port}" in stack.pages()
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "team")
    assert "/namespaces/team/" in stack.workflow_page("run/a")


def test_the_ui_of_a_server_elsewhere(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "rl.a1b2c.tmprl.cloud:7233")
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "rl.a1b2c")
    said = stack.workflow_page("run/a")
    assert "127.0.0.1" not in said and "http" not in said, "nothing listens there"
    assert said.startswith("run/a at rl.a1b2c.tmprl.cloud:7233") and "RATCHET_TEMPORAL_UI" in said
    assert "Temporal UI" not in stack.pages()
    monkeypatch.setenv("RATCHET_TEMPORAL_UI", "https://cloud.temporal.io/")
    assert stack.workflow_page("run/a") == "https://cloud.temporal.io/namespaces/rl.a1b2c/workflows/run%2Fa"
    assert stack.pages().endswith("Temporal UI https://cloud.temporal.io")
    assert viewer_settings(stack, "127.0.0.1").temporal_ui == "https://cloud.temporal.io"


def test_a_usual_port_that_was_taken_is_said(stack: Stack) -> None:
    stack.ports |= PREFERRED_PORTS | {"temporal_ui": 9999}
    assert stack.pages().endswith("Temporal UI http://127.0.0.1:9999 (port 8233 was taken)")
