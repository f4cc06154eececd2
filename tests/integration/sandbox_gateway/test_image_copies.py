"""Boxes of a gateway whose directory is on an overlay, as in a container: overlays cannot have their layers there."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratchet.errors import SandboxBusyError, SandboxFullError
from sandbox_gateway.boxd.id_modes import MODES, ONE_ID, ROOT, IdMode
from sandbox_gateway.settings import GatewaySettings
from sandboxes.base import Sandbox
from tests.integration.sandbox_gateway.conftest import CHECKOUT, GatewayProcess, eventually, provider_of, running
from tests.integration.sandbox_gateway.image_files import make_tree
from tests.integration.sandbox_gateway.ordinary_user import USER, OrdinaryUser, ordinary_user

_ON_OVERLAY = """set -e
mount --make-rprivate /
mkdir -p {at}/disk
[ -z "{size}" ] || mount -t tmpfs -o size={size},mode=755 tmpfs {at}/disk
mkdir -p {at}/lower {at}/disk/upper {at}/disk/work {at}/state
chown {owner} {at} {at}/disk/upper
mount -t overlay overlay -o lowerdir={at}/lower,upperdir={at}/disk/upper,workdir={at}/disk/work {at}/state
[ ! -e {at}/cp ] || mount --bind {at}/cp $(readlink -f $(command -v cp))
echo ready
read _
"""
_SLOW = """#!/bin/bash
echo $$ >>{at}/copying
while [ ! -e {at}/go ]; do sleep 0.05; done
exec {at}/real-cp "$@"
"""
_ADD = "import sys; from pathlib import Path; from sandbox_gateway.image_store import ImageStore; "
_ADD += "ImageStore(Path(sys.argv[1])).add(Path(sys.argv[2]), 'small', print)"
_PROBE = "from sandbox_gateway.machine_probe import probe_machine\n"
_PROBE += "print(*(one.reason for one in probe_machine() if one.name == 'shared images' and not one.on))"
_TTL_SECONDS = 300
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


@dataclass(frozen=True)
class Place:
    """`state`: a directory of the caller on an overlay, as commands with `prefix` see it; `outside`: from here."""

    state: Path
    outside: Path
    prefix: list[str]

    async def has_no_box(self) -> bool:
        """Return whether no file of a box is left."""
        return not [*self.outside.glob("gateway/boxes/*"), *self.outside.glob("gateway/trash/*")]


@contextmanager
def on_overlay(caller: OrdinaryUser, at: Path, size: str = "") -> Iterator[Place]:
    """Make a place. `size`: of the disk that the overlay writes to."""
    at.mkdir(exist_ok=True)
    script = _ON_OVERLAY.format(at=at, owner=USER if caller.prefix else 0, size=size)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["unshare", "-m", "bash", "-c", script], **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == b"ready\n"
        inside = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "bash", "-c", f'cd {CHECKOUT}; exec "$@"', "bash"]
        yield Place(at / "state", Path(f"/proc/{holder.pid}/root{at}/state"), [*inside, *caller.prefix])
        holder.stdin.close()


def make_image(caller: OrdinaryUser, images: Path, prefix: list[str]) -> None:
    """Import the image `small`, with files of two users, a hard link and 64 MiB."""
    tree = make_tree(Path(str(images) + "-tree"))
    os.link(tree / "srv/from-image", tree / "srv/linked")
    os.chown(tree / "srv/from-image", 1000, 1000)
    os.chmod(tree / "srv/from-image", 0o744)
    os.utime(tree / "srv/from-image", (1_000_000_000, 1_000_000_000))
    (tree / "srv/large").write_bytes(bytes(64 << 20))
    subprocess.run([*prefix, sys.executable, "-c", _ADD, str(images), str(tree)], check=True, cwd=CHECKOUT)


@pytest.fixture(scope="module")
def gateway(
    caller: OrdinaryUser, mode: IdMode, make_settings: Callable[[Path], GatewaySettings]
) -> Iterator[GatewayProcess]:
    """A gateway with an image. Its boxes have no own disks."""
    with on_overlay(caller, caller.home / "of-gateway") as place:
        make_image(caller, place.state.parent / "images", place.prefix)
        yield from running(settings_at(place, caller, make_settings), place.prefix)


def settings_at(
    place: Place, caller: OrdinaryUser, make_settings: Callable[[Path], GatewaySettings]
) -> GatewaySettings:
    changes = {"images_directory": caller.home / "of-gateway/images", "disk_bytes": None, "max_concurrent_boots": 1}
    return make_settings(place.state / "gateway").model_copy(update=changes)


async def small_box(gateway: GatewayProcess, key: str = "", image: str = "small") -> Sandbox:
    return await provider_of(gateway).create(
        image, ttl_seconds=_TTL_SECONDS, metadata={}, idempotency_key=key or uuid.uuid4().hex, network=False
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


@dataclass(frozen=True)
class SlowGateway:
    """A gateway whose copies wait for `go`; `begun` has the pid of each that has begun."""

    process: GatewayProcess
    begun: Path
    go: Path
    place: Place

    async def until_begun(self) -> None:
        async def begun() -> bool:
            return self.begun.exists() and self.begun.read_text() != ""

        await eventually(begun)


@pytest.fixture
def slow(
    caller: OrdinaryUser, gateway: GatewayProcess, make_settings: Callable[[Path], GatewaySettings]
) -> Iterator[SlowGateway]:
    at = caller.home / f"slow-{uuid.uuid4().hex}"
    at.mkdir()
    copier = shutil.which("cp")
    assert copier is not None
    shutil.copy(copier, at / "real-cp")
    (at / "cp").write_text(_SLOW.format(at=at))
    (at / "cp").chmod(0o755)
    with on_overlay(caller, at) as place:
        for process in running(settings_at(place, caller, make_settings), place.prefix):
            yield SlowGateway(process, at / "copying", at / "go", place)
            (at / "go").touch()


async def test_a_time_to_live_begins_when_the_box_is_ready(slow: SlowGateway) -> None:
    """Also that of a box without a copy, whose boot waits for a slow one."""
    boots = [asyncio.create_task(small_box(slow.process))]
    await slow.until_begun()
    boots.append(asyncio.create_task(small_box(slow.process, image="host")))
    done, _ = await asyncio.wait(boots, timeout=2)
    assert not done
    released = time.time()
    slow.go.touch()
    for box in await asyncio.gather(*boots):
        ends_at = (await provider_of(slow.process).describe(box.id)).ends_at
        assert ends_at is not None and released + _TTL_SECONDS <= ends_at.timestamp() <= time.time() + _TTL_SECONDS
        assert (await box.exec("echo alive")).stdout == "alive\n"
        await box.kill()


async def test_a_boot_outlives_its_gateway_and_its_box_is_that_of_its_key(slow: SlowGateway) -> None:
    key = uuid.uuid4().hex
    boot = asyncio.create_task(small_box(slow.process, key))
    await slow.until_begun()
    slow.process.end(signal.SIGKILL)
    with pytest.raises(SandboxBusyError):
        await boot
    slow.process.start()
    with pytest.raises(SandboxBusyError, match="cannot be reached at present"):
        await small_box(slow.process, key)
    slow.go.touch()
    box: list[Sandbox] = []

    async def ready() -> bool:
        try:
            box.append(await small_box(slow.process, key))
        except SandboxBusyError:
            return False
        return True

    await eventually(ready)
    assert (await box[0].exec("cat /srv/linked; stat -c %s /srv/large")).stdout == f"image\n{64 << 20}\n"
    assert len(slow.begun.read_text().split()) == 1, "the image was copied once"


async def test_a_copy_that_is_killed_leaves_nothing(slow: SlowGateway) -> None:
    boot = asyncio.create_task(small_box(slow.process))
    await slow.until_begun()
    os.kill(int(slow.begun.read_text()), signal.SIGKILL)
    with pytest.raises(SandboxBusyError, match=r"the image, \d+ MiB, cannot be copied to "):
        await boot
    assert slow.process.call("GET", "/v2/sandboxes").json() == []
    await eventually(slow.place.has_no_box)


async def test_a_full_disk_is_named_and_takes_no_place(
    caller: OrdinaryUser, gateway: GatewayProcess, make_settings: Callable[[Path], GatewaySettings]
) -> None:
    """The failed boots are more than there may be boxes."""
    with on_overlay(caller, caller.home / f"full-{uuid.uuid4().hex}", "40m") as place:
        settings = settings_at(place, caller, make_settings).model_copy(update={"max_boxes": 2})
        for process in running(settings, place.prefix):
            said = rf"the image, 7\d MiB, cannot be copied to {place.state}/gateway/boxes/i\w+: .*No space left"
            for _ in range(3):
                with pytest.raises(SandboxFullError, match=said):
                    await small_box(process)
                await eventually(place.has_no_box)
            async with await small_box(process, image="host") as box:
                assert (await box.exec("echo alive")).stdout == "alive\n"


def test_doctor_says_what_a_copy_costs(caller: OrdinaryUser, mode: IdMode) -> None:
    """Of the directory of the boxes, which may be a link to another disk."""
    with on_overlay(caller, caller.home / "of-doctor") as place:
        home = place.state.parent / "home"
        home.mkdir()
        (home / "boxes").symlink_to(place.state)
        command = [*place.prefix, "env", f"RATCHET_HOME={home}", sys.executable, "-c", _PROBE]
        said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT).stdout
    if mode is ROOT:
        assert said.strip() == "", "boxes of root have disks of their own, on which overlays work"
    else:
        assert f"cannot be mounted in {place.state}" in said and "copies its whole image" in said
