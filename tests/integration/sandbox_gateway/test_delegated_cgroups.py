"""An ordinary user's gateway in a control group of version 2 that is delegated to the user."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox_gateway.boxd import cgroups
from sandbox_gateway.boxd.id_modes import SUBORDINATE_IDS
from sandbox_gateway.settings import GatewaySettings
from sandboxes.base import Sandbox
from sandboxes.e2b import E2BProvider
from tests.integration.sandbox_gateway.conftest import CHECKOUT, GatewayProcess, boxd_pid, make_box, running
from tests.integration.sandbox_gateway.ordinary_user import USER, OrdinaryUser, ordinary_user
from tests.integration.sandbox_gateway.test_contract import test_pause_and_resume  # noqa: F401
from tests.integration.sandbox_gateway.test_isolation import (  # noqa: F401
    test_a_fork_bomb_is_contained,
    test_a_memory_hog_is_contained,
)

_ENTER = 'cd {group}; {{ echo $$ >{leaf}/cgroup.procs || echo $$ >cgroup.procs; }} 2>/dev/null; cd "$OLDPWD"; exec "$@"'


@contextmanager
def delegated_group() -> Iterator[Path]:
    """Yield a group whose files of delegation are the user's, as systemd makes it."""
    if os.geteuid() != 0 or not cgroups._is_v2() or cgroups.usable_version() != 2:
        pytest.skip("delegating takes root and control groups of version 2")
    made = Path(cgroups.MOUNT) / f"ratchet-test-{uuid.uuid4().hex}"
    try:
        (Path(cgroups.MOUNT) / "cgroup.subtree_control").write_text("+memory +pids")
        made.mkdir()
    except OSError as error:
        pytest.skip(f"this machine's groups cannot be delegated: {error}")
    for path in (made, *(made / f"cgroup.{name}" for name in ("procs", "subtree_control", "threads"))):
        shutil.chown(path, USER, USER)
    yield made
    for directory, _names, _files in os.walk(made, topdown=False):
        cgroups.Cgroup([directory], 2).remove()


def entering(group: Path, caller: OrdinaryUser) -> list[str]:
    """Return the prefix of a command of the caller in the group, or in the leaf that its processes have moved to."""
    return ["bash", "-c", _ENTER.format(group=group, leaf=cgroups._LEAF), "bash", *caller.prefix]


@pytest.fixture(scope="module")
def group() -> Iterator[Path]:
    with delegated_group() as made:
        yield made


@pytest.fixture(scope="module")
def caller(python_layer: Path) -> Iterator[OrdinaryUser]:
    with ordinary_user(SUBORDINATE_IDS, [python_layer]) as made:
        yield made


@pytest.fixture(scope="module")
def gateway(
    group: Path, caller: OrdinaryUser, make_settings: Callable[[Path], GatewaySettings]
) -> Iterator[GatewayProcess]:
    yield from running(make_settings(caller.home / "gateway"), entering(group, caller))


def _group_of(pid: int) -> Path:
    return Path(cgroups.MOUNT + Path(f"/proc/{pid}/cgroup").read_text().strip().removeprefix("0::"))


async def test_each_box_has_a_group_beside_the_leaf_of_the_gateway(
    gateway: GatewayProcess, group: Path, box: Sandbox
) -> None:
    assert _group_of(gateway.fork_server()) == _group_of(boxd_pid(gateway, box.id)) == group / cgroups._LEAF
    assert [path.parent.parent for path in group.glob(f"*/{box.id}")] == [group]


async def test_boxes_of_an_earlier_gateway_end_with_their_groups(
    gateway: GatewayProcess, group: Path, provider: E2BProvider
) -> None:
    box = await make_box(provider)
    (own,) = group.glob(f"*/{box.id}")
    gateway.end()
    gateway.start()
    assert (await box.exec("echo alive")).stdout == "alive\n"
    assert await provider.kill(box.id)
    assert not own.exists()


def test_doctor_moves_no_process(caller: OrdinaryUser) -> None:
    probe = "from sandbox_gateway.machine_probe import probe_machine\n"
    probe += "print([(one.on, one.reason) for one in probe_machine() if one.name == 'memory and process limits'])\n"
    probe += "print(open('/proc/self/cgroup').read())"
    with delegated_group() as group:
        command = [*entering(group, caller), sys.executable, "-c", probe]
        said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT).stdout
        assert f"[(True, 'control groups of {group.name}" in said and f"0::/{group.name}\n" in said
