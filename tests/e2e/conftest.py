"""A complete local stack for the end-to-end tests, with its own state directory and ports. Starting it takes a minute,
so the tests of this folder share one.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import yaml
from sqlalchemy.ext.asyncio import AsyncConnection

from cli.console import say
from examples.tiny_policy.build import make_tiny_policy
from ratchet import paths
from stack.parts import Stack
from stack.supervisor import Supervisor
from store.database import Database
from tests.free_ports import free_ports

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_policy() -> Path:
    """The default policy, made once per machine and digest."""
    out = paths.cache() / "tests" / "tiny-0"
    make_tiny_policy(out, 0, say)
    return out


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """A directory outside pytest's, which other sessions clear; the embedded server's user can read it."""
    directory = Path(tempfile.mkdtemp(prefix="ratchet-e2e-"))
    directory.chmod(0o755)
    before = os.environ.get("RATCHET_HOME")
    os.environ["RATCHET_HOME"] = str(directory)
    yield directory
    if before is None:
        del os.environ["RATCHET_HOME"]
    else:
        os.environ["RATCHET_HOME"] = before
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def config_path(home: Path, tiny_policy: Path) -> Path:
    """The quickstart, smaller: three steps of exactly three groups, however many groups without signal come; no
    evaluation.
    """
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["model"] = str(tiny_policy)
    for dataset in config["datasets"]:
        dataset["path"] = str(ROOT / "datasets" / "quickstart" / Path(dataset["path"]).name)
    config["training"] |= {
        "steps": 3,
        "groups_per_step": 3,
        "group_size": 4,
        "checkpoint_every": 2,
        "updates_per_step": 1,
    }
    config["training"]["max_groups_seen"] = 1000
    config["evaluation"] = {"at": []}
    config["sandbox"]["max_boxes"] = 16
    path = home / "e2e.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def stack(config_path: Path, home: Path) -> Iterator[Stack]:
    """A started stack; it ends with all its boxes."""
    from cli.down import kill_stack_boxes
    from ratchet.config_sources import load_config
    from stack.startup import bring_up

    free_ports(home)
    found = Stack(home)
    try:
        bring_up(found, load_config(config_path), say)
        yield found
        asyncio.run(kill_stack_boxes(found.environment()))
    finally:
        Supervisor(found).down()


@pytest.fixture(scope="session")
def read(stack: Stack) -> Callable[[Callable[[AsyncConnection], object]], object]:
    """Run one reading coroutine on the stack's store."""

    def run(work: Callable[[AsyncConnection], object]) -> object:
        async def inside() -> object:
            database = Database(stack.environment()["RATCHET_DATABASE_URL"], pool_size=1)
            try:
                async with database.begin() as connection:
                    return await work(connection)  # type: ignore[misc]
            finally:
                await database.close()

        return asyncio.run(inside())

    return run
