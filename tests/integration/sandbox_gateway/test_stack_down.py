"""Boxes outlive `ratchet down`, which says so; with `--boxes` they end, also if the gateway has ended before."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.box_lifecycle import INSTALLATION_KEY
from cli.down import kill_stack_boxes
from sandbox_gateway.box_end import living_boxes, metadata_of
from sandboxes.e2b import E2BProvider
from store import installations
from store.database import Database
from tests.free_ports import free_ports
from tests.integration.sandbox_gateway.conftest import API_KEY, CHECKOUT, GatewayProcess, make_box


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


async def test_boxes_of_others_live_on(
    own_gateway: GatewayProcess, own_provider: E2BProvider, database: Database, postgres_url: str
) -> None:
    """Another installation, and a program without any, may use the same gateway."""
    async with database.begin() as connection:
        own = str(await installations.installation_id(connection))
    for metadata in ({INSTALLATION_KEY: own}, {INSTALLATION_KEY: str(uuid.uuid4())}, {"owner": own}):
        await own_provider.create("host", ttl_seconds=900, metadata=metadata, idempotency_key=uuid.uuid4().hex)
    environment = {
        "E2B_API_KEY": API_KEY,
        "E2B_API_URL": own_gateway.url + "/",
        "E2B_SANDBOX_URL": own_gateway.url,
        "RATCHET_DATABASE_URL": postgres_url,
    }
    assert await kill_stack_boxes(environment) == (1, (own,))
    kept = [metadata_of(directory) for directory in living_boxes(own_gateway.settings.root_directory)]
    assert len(kept) == 2 and all(one.get(INSTALLATION_KEY) != own for one in kept)
    left = [info.metadata for info in await own_provider.list({})]
    assert len(left) == 2 and all(one.get(INSTALLATION_KEY) != own for one in left)
