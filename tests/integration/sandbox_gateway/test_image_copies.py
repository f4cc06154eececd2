"""Boxes of a gateway whose directory is on an overlay, as in a container: overlays cannot have their layers there."""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_gateway.boxd.id_modes import MODES, ONE_ID, ROOT, IdMode
from sandbox_gateway.settings import GatewaySettings
from sandboxes.base import Sandbox
from tests.integration.sandbox_gateway.conftest import CHECKOUT, GatewayProcess, provider_of, running
from tests.integration.sandbox_gateway.image_files import make_tree
from tests.integration.sandbox_gateway.ordinary_user import USER, OrdinaryUser, ordinary_user

_ON_OVERLAY = """set -e
mkdir -p {at}/lower {at}/upper {at}/work {at}/state
chown {owner} {at}/upper
mount -t overlay overlay -o lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work {at}/state
exec "$@"
"""
_ADD = "import sys; from pathlib import Path; from sandbox_gateway.image_store import ImageStore; "
_ADD += "ImageStore(Path(sys.argv[1])).add(Path(sys.argv[2]), 'small', print)"
_PROBE = "from sandbox_gateway.machine_probe import probe_machine\n"
_PROBE += "print(*(one.reason for one in probe_machine() if one.name == 'shared images' and not one.on))"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and becoming another user take root")


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> IdMode:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def caller(mode: IdMode, python_layer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OrdinaryUser]:
    if mode is ROOT:
        yield OrdinaryUser(tmp_path_factory.mktemp("home"), ())
    else:
        with ordinary_user(mode, [python_layer]) as made:
            yield made


def on_overlay(caller: OrdinaryUser, at: Path) -> list[str]:
    """Return the prefix of a command of the caller for which `at / "state"` is on an overlay."""
    script = _ON_OVERLAY.format(at=at, owner=USER if caller.prefix else 0)
    return ["unshare", "-m", "bash", "-c", script, "bash", *caller.prefix]


@pytest.fixture(scope="module")
def gateway(
    caller: OrdinaryUser, mode: IdMode, make_settings: Callable[[Path], GatewaySettings]
) -> Iterator[GatewayProcess]:
    """A gateway with the image `small`, with files of two users and a hard link. Its boxes have no own disks."""
    tree = make_tree(caller.home / "tree")
    os.link(tree / "srv/from-image", tree / "srv/linked")
    os.chown(tree / "srv/from-image", 1000, 1000)
    os.chmod(tree / "srv/from-image", 0o744)
    os.utime(tree / "srv/from-image", (1_000_000_000, 1_000_000_000))
    at = caller.home / "of-gateway"
    images = at / "state/images"
    subprocess.run(
        [*on_overlay(caller, at), sys.executable, "-c", _ADD, str(images), str(tree)], check=True, cwd=CHECKOUT
    )
    settings = make_settings(at / "state/gateway").model_copy(update={"images_directory": images, "disk_bytes": None})
    yield from running(settings, on_overlay(caller, at))


async def small_box(gateway: GatewayProcess) -> Sandbox:
    return await provider_of(gateway).create(
        "small", ttl_seconds=300, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
    )


async def test_a_copy_has_what_the_image_has(gateway: GatewayProcess, mode: IdMode) -> None:
    async with await small_box(gateway) as box:
        seen = (await box.exec("stat -c '%u:%g %a %h %Y' /srv/from-image /srv/linked; cat /srv/linked")).stdout
        owner = "0:0" if mode is ONE_ID else "1000:1000"
        assert seen.splitlines() == [f"{owner} 744 2 1000000000"] * 2 + ["image"]
        assert (await box.exec("stat -c '%u %a' / /bin/bash /tmp")).stdout.split() == ["0", "755"] * 2 + ["0", "755"]
        assert (await box.exec("ls /opt/ratchet/bin/python3")).stdout


async def test_what_a_box_changes_is_its_own(gateway: GatewayProcess) -> None:
    async with await small_box(gateway) as box, await small_box(gateway) as other:
        await box.exec("echo changed >/srv/from-image; echo new >/etc/new; chown 12:12 /etc/new 2>/dev/null || true")
        assert (await box.exec("cat /srv/linked /etc/new")).stdout == "changed\nnew\n"
        assert (await other.exec("cat /srv/linked; ls /etc/new || true")).stdout == "image\n"


def test_doctor_says_what_a_copy_costs(caller: OrdinaryUser, mode: IdMode) -> None:
    at = caller.home / "of-doctor"
    command = [*on_overlay(caller, at), "env", f"RATCHET_HOME={at}/state", sys.executable, "-c", _PROBE]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT).stdout
    if mode is ROOT:
        assert said.strip() == "", "boxes of root have disks of their own, on which overlays work"
    else:
        assert f"cannot be mounted in {at}/state" in said and "copies its whole image" in said
