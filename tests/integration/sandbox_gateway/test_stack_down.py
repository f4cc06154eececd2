"""Boxes outlive `ratchet down`, which says so; with `--boxes` they end, also if the gateway has ended before."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.sandboxes.e2b import E2BProvider
from sandbox_gateway.box_end import living_boxes
from stack.parts import free_ports
from tests.integration.sandbox_gateway.conftest import CHECKOUT, GatewayProcess, make_box


@pytest.fixture
def home(own_gateway: GatewayProcess) -> Iterator[Path]:
    """A state directory without a supervisor, whose boxes are those of the gateway."""
    directory = Path(tempfile.mkdtemp(prefix="ratchet-down-"))
    free_ports(directory)
    (directory / "boxes").symlink_to(own_gateway.settings.root_directory)
    yield directory
    shutil.rmtree(directory)


def down(home: Path, *options: str) -> str:
    environment = {**os.environ, "RATCHET_HOME": str(home)}
    command = [sys.executable, "-m", "cli.main", "down", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, env=environment, check=True)
    return done.stderr


async def test_boxes_outlive_the_stack_and_end_on_request(
    own_gateway: GatewayProcess, own_provider: E2BProvider, home: Path
) -> None:
    await make_box(own_provider)
    own_gateway.end(signal.SIGKILL)
    said = down(home)
    assert "sandboxes of open rollouts run on until their time to live (1)" in said
    assert "`ratchet down --boxes` ends them" in said
    assert len(living_boxes(own_gateway.settings.root_directory)) == 1
    assert "sandboxes" not in down(home, "--boxes")
    assert living_boxes(own_gateway.settings.root_directory) == []
    assert "sandboxes" not in down(home)
