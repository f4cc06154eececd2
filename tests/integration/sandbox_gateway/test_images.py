"""Images: imported from every format, booted by reference, shared and locked by boxes, removed."""

import fcntl
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from grading.git_scripts import ENSURE_AGENT_USER
from ratchet.errors import ConfigError
from sandbox_gateway import image_archive, images
from sandbox_gateway.boxd import cgroups
from sandbox_gateway.image_store import ImageStore
from sandbox_gateway.images import Catalogue
from sandbox_gateway.machine_probe import probe_machine
from sandbox_gateway.settings import GatewaySettings
from sandboxes.base import Sandbox
from sandboxes.e2b import E2BProvider
from tests.integration.ratchet_command import Ended, Ratchet
from tests.integration.sandbox_gateway import image_files
from tests.integration.sandbox_gateway.conftest import CHECKOUT, GatewayProcess, eventually, provider_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="images keep their files' owners, which only root may set")

CHANGES: list[image_files.Entry] = [
    ("srv/.wh.removed", "", {}),
    ("srv/replaced/.wh..wh..opq", "", {}),
    ("srv/replaced/new", "new\n", {}),
    ("srv/owned", "owned\n", {"uid": 1234, "gid": 50, "mode": 0o640, "mtime": 1_000_000_000}),
    ("srv/far", "far\n", {"uid": 3_000_000}),
    ("srv/link", "", {"type": b"2", "linkname": "/srv/owned"}),
    ("srv/hard", "", {"type": b"1", "linkname": "srv/owned"}),
    ("srv/turned", "a file now\n", {}),
    ("dev/sda", "", {"type": b"4"}),
]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A base layer, and one on top that changes it in every way a layer can."""
    tree = image_files.make_tree(tmp_path_factory.mktemp("tree") / "root")
    (tree / "srv" / "removed").write_text("old\n")
    (tree / "srv" / "replaced" / "deep").mkdir(parents=True)
    (tree / "srv" / "replaced" / "deep" / "old").write_text("old\n")
    (tree / "srv" / "turned").mkdir()
    (tree / "srv" / "turned" / "inside").write_text("old\n")
    return [image_files.tree_layer(tree), image_files.make_layer(CHANGES)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def gateway(
    make_settings: Callable[[Path], GatewaySettings], tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> Iterator[Any]:
    """A gateway that starts before any import, so it must notice images that are added and removed."""
    settings = make_settings(tmp_path_factory.mktemp("gateway")).model_copy(
        update={"images_directory": cache / "ratchet" / "images"}
    )
    running = GatewayProcess(settings)
    running.start()
    try:
        yield running
    finally:
        running.kill_all_boxes()
        running.end()


Images = Callable[..., Ended]


@pytest.fixture
def ratchet_images(ratchet: Ratchet) -> Images:
    """Run `ratchet tasks images` on the images of a cache directory."""

    def run(cache: Path, *arguments: str | Path) -> Ended:
        return ratchet("tasks", "images", *map(str, arguments), XDG_CACHE_HOME=str(cache))

    return run


@pytest.fixture
def import_image(ratchet_images: Images) -> Callable[..., dict[str, Any]]:
    def run(cache: Path, *arguments: str | Path) -> dict[str, Any]:
        done = ratchet_images(cache, "import", *arguments, "--json")
        assert done.code == 0, done.error
        return dict(json.loads(done.output))

    return run


async def boot(provider: E2BProvider, reference: str) -> Sandbox:
    return await provider.create(reference, ttl_seconds=120, metadata={}, idempotency_key=uuid.uuid4().hex)


@pytest.fixture
async def box_of(gateway: GatewayProcess) -> AsyncIterator[Callable[[str], Any]]:
    """Boot boxes that end with the test."""
    boxes: list[Sandbox] = []

    async def make(reference: str) -> Sandbox:
        boxes.append(await boot(provider_of(gateway), reference))
        return boxes[-1]

    yield make
    for box in boxes:
        await box.kill()


def _bring(kind: str, tmp_path: Path, layers: list[bytes]) -> tuple[list[str | Path], str]:
    """Return (arguments of import, the resulting reference)."""
    if kind == "docker-archive":
        return [
            image_files.write_docker_archive(tmp_path / "a.tar", layers, ["docker.io/team/image:1"])
        ], "team/image:1"
    if kind == "docker-archive.gz":
        plain = image_files.write_docker_archive(tmp_path / "a.tar", layers, ["team/zipped"])
        (tmp_path / "a.tar.gz").write_bytes(gzip.compress(plain.read_bytes(), 1))
        return [tmp_path / "a.tar.gz"], "team/zipped:latest"
    if kind == "oci-archive":
        return [image_files.write_oci_archive(tmp_path / "o.tar", layers, "registry.example:5000/team/image:2")], (
            "registry.example:5000/team/image:2"
        )
    return [
        image_files.write_oci_layout(tmp_path / "o", layers, "latest"),
        "--name",
        "python:3.12",
    ], "library/python:3.12"


@pytest.mark.parametrize("kind", ["docker-archive", "docker-archive.gz", "oci-archive", "oci-layout"])
async def test_an_archive_boots_as_the_image_says(
    kind: str,
    layers: list[bytes],
    tmp_path: Path,
    cache: Path,
    gateway: GatewayProcess,
    box_of: Callable[[str], Any],
    import_image: Callable[..., dict[str, Any]],
) -> None:
    arguments, reference = _bring(kind, tmp_path, layers)
    facts = import_image(cache, *arguments)
    assert (facts["workdir"], facts["user"]) == ("/srv/work", "1234:staff")
    box = await box_of(reference)

    # As the image's own user, in its directory, with its environment; PATH survives a login shell.
    plain = await _run_as_default_user(
        gateway, box, "id -u; id -g; pwd; echo $FROM_IMAGE; our-tool; ls /opt/ratchet/bin/python3"
    )
    assert plain.splitlines() == ["1234", "50", "/srv/work", "yes and = more", "tool", "/opt/ratchet/bin/python3"]

    listed = (await box.exec("cd /srv; ls; ls replaced; cat turned link")).stdout.split("\n")
    assert listed[:9] == ["far", "from-image", "hard", "link", "owned", "replaced", "turned", "work", "new"]
    assert listed[9:11] == ["a file now", "owned"]
    assert (
        await box.exec("stat -c '%u %g %a %Y %h' /srv/owned; stat -c %u /srv/far")
    ).stdout == "1234 50 640 1000000000 2\n65534\n"
    assert (await box.exec("ls /dev/sda", check=False)).exit_code != 0
    assert (await box.exec("cat /etc/hosts")).stdout.startswith("127.0.0.1\tlocalhost")


async def _run_as_default_user(gateway: GatewayProcess, box: Sandbox, command: str) -> str:
    from e2b import AsyncSandbox

    options = {"api_key": gateway.settings.api_key, "api_url": gateway.url, "sandbox_url": gateway.url}
    connected = await AsyncSandbox.connect(box.id, **options)
    return str((await connected.commands.run(command)).stdout)


@pytest.mark.parametrize("name", ["Tree", "Tree.tar", "tree.tar.gz"])
async def test_a_plain_tree_boots(
    name: str,
    layers: list[bytes],
    tmp_path: Path,
    cache: Path,
    box_of: Callable[[str], Any],
    import_image: Callable[..., dict[str, Any]],
) -> None:
    source = tmp_path / name
    if name == "Tree":
        image_files.make_tree(source)
    else:
        source.write_bytes(gzip.compress(layers[0], 1) if name.endswith(".gz") else layers[0])
    facts = import_image(cache, source)
    assert facts["reference"] == "tree:latest"
    box = await box_of(facts["reference"])
    assert (await box.exec("cat /srv/from-image; id -u")).stdout == "image\n0\n"


async def test_two_boxes_share_an_image_and_not_their_changes(
    layers: list[bytes],
    tmp_path: Path,
    cache: Path,
    box_of: Callable[[str], Any],
    import_image: Callable[..., dict[str, Any]],
) -> None:
    facts = import_image(cache, image_files.write_docker_archive(tmp_path / "a.tar", layers, ["shared"]))
    first, second = await box_of("shared"), await box_of("docker.io/library/shared:latest")
    await first.exec("echo changed > /srv/from-image; mkdir /new")
    assert await first.read_file("/srv/from-image") == b"changed\n"
    assert await second.read_file("/srv/from-image") == b"image\n"
    assert (await second.exec("ls -d /new", check=False)).exit_code != 0
    rootfs = Path(facts["directory"]) / "rootfs"
    assert (rootfs / "srv" / "from-image").read_text() == "image\n"
    assert not (rootfs / "new").exists()


async def test_the_agent_gets_a_user_of_its_own_in_an_image_that_has_none(
    layers: list[bytes],
    tmp_path: Path,
    cache: Path,
    box_of: Callable[[str], Any],
    import_image: Callable[..., dict[str, Any]],
) -> None:
    import_image(cache, image_files.write_docker_archive(tmp_path / "a.tar", layers, ["no-agent"]))
    box = await box_of("no-agent")
    for _ in range(2):
        await box.exec(ENSURE_AGENT_USER)
    # Another user has 1000 in this image.
    assert (await box.exec("id -u; id -gn; cd; pwd; touch mine", user="agent")).stdout == "1001\nagent\n/home/agent\n"
    assert (await box.exec("grep -c agent /etc/passwd")).stdout == "1\n"


async def test_an_unknown_reference_is_refused_with_its_name(gateway: GatewayProcess) -> None:
    answer = gateway.call("POST", "/sandboxes", json={"templateID": "base", "metadata": {"image": "nobody/has-this:7"}})
    assert answer.status_code == 404
    assert "nobody/has-this:7" in answer.json()["message"] and "ratchet tasks images import" in answer.json()["message"]
    with pytest.raises(ConfigError, match="nobody/has-this:7"):
        await boot(provider_of(gateway), "nobody/has-this:7")


async def test_a_removed_image_stays_while_a_box_uses_it(
    layers: list[bytes],
    tmp_path: Path,
    cache: Path,
    gateway: GatewayProcess,
    box_of: Callable[[str], Any],
    import_image: Callable[..., dict[str, Any]],
    ratchet_images: Images,
) -> None:
    changed = [*layers, image_files.make_layer([("srv/only-here", "here\n", {})])]
    facts = import_image(cache, image_files.write_docker_archive(tmp_path / "a.tar", changed, ["held:1", "held:2"]))
    box = await box_of("held:1")
    # The config's digest is known, so this only adds a second name.
    assert import_image(cache, tmp_path / "a.tar", "--name", "held:2")["directory"] == facts["directory"]
    directory = Path(facts["directory"])
    assert ratchet_images(cache, "remove", "held:1").code == 0
    assert directory.is_dir(), "the other name still holds it"
    done = ratchet_images(cache, "remove", "held:2")
    assert "boxes still use" in done.error and directory.is_dir()
    assert gateway.call("POST", "/sandboxes", json={"templateID": "held:2"}).status_code == 404
    assert (await box.exec("cat /srv/only-here")).stdout == "here\n"
    await box.kill()

    async def collected() -> bool:
        import_image(cache, tmp_path / "a.tar", "--name", "again")
        ratchet_images(cache, "remove", "again")
        return not directory.exists()

    await eventually(collected, 60)
    assert ratchet_images(cache, "remove", "held:2").code == 2


def test_list_shows_what_was_imported(
    layers: list[bytes], tmp_path: Path, import_image: Callable[..., dict[str, Any]], ratchet_images: Images
) -> None:
    source = image_files.write_docker_archive(tmp_path / "a.tar", layers, ["docker.io/library/listed"])
    facts = import_image(tmp_path, source)
    listed = json.loads(ratchet_images(tmp_path, "list", "--json").output)
    assert listed == [facts]
    assert facts["reference"] == "listed:latest" and facts["source"] == str(source) and facts["size_bytes"] > 1_000_000
    assert facts["digest"].startswith("sha256:")
    assert "listed:latest" in ratchet_images(tmp_path, "list").output


HOSTILE: dict[str, list[image_files.Entry]] = {
    "parent directories": [("../../../../{outside}/file", "x", {})],
    "an absolute name": [("{outside}/file", "x", {})],
    "through a link": [("out", "", {"type": b"2", "linkname": "{outside}"}), ("out/file", "x", {})],
    "a hard link": [("stolen", "", {"type": b"1", "linkname": "{outside}/secret"})],
    "a whiteout": [("out", "", {"type": b"2", "linkname": "{outside}"}), ("out/.wh.secret", "", {})],
    "an opaque link": [("out", "", {"type": b"2", "linkname": "{outside}"}), ("out/.wh..wh..opq", "", {})],
    "links that lead nowhere": [("loop", "", {"type": b"2", "linkname": "loop"}), ("loop/file", "x", {})],
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_layer_reaches_nothing_outside(attack: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    entries = [
        (
            name.format(outside=outside),
            content,
            {k: v.format(outside=outside) if isinstance(v, str) else v for k, v in attributes.items()},
        )
        for name, content, attributes in HOSTILE[attack]
    ]
    store = ImageStore(tmp_path / "images")
    source = image_files.write_docker_archive(tmp_path / "a.tar", [image_files.make_layer(entries)], ["hostile"])
    found: list[bytes] = []
    try:
        rootfs = store.add(source, None, print).directory / "rootfs"
        found = [path.read_bytes() for path in rootfs.rglob("stolen") if path.is_file()]
    except ConfigError as refused:
        assert "cannot be unpacked" in str(refused)
    assert found == []
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_text() == "secret" and (outside / "secret").stat().st_nlink == 1


@pytest.mark.parametrize("damage", ["a changed layer", "a missing layer", "a cut archive", "no image", "no name"])
def test_what_is_no_image_is_refused_and_leaves_nothing(damage: str, layers: list[bytes], tmp_path: Path) -> None:
    store, source = ImageStore(tmp_path / "images"), tmp_path / "a.tar"
    small = [layers[1]]
    if damage == "a changed layer":
        image_files.write_docker_archive(source, [layers[1] + b"\0"], ["x"], image_files.make_config(small))
    elif damage == "a missing layer":
        source = image_files.write_oci_layout(tmp_path / "layout", small, "a/b:c")
        max((source / "blobs" / "sha256").iterdir(), key=lambda blob: blob.read_bytes()[:2] == b"\x1f\x8b").unlink()
    elif damage == "a cut archive":
        source.write_bytes(image_files.write_docker_archive(source, small, ["x"]).read_bytes()[:3000])
    elif damage == "no image":
        source.write_bytes(os.urandom(5000))
    else:
        image_files.write_oci_archive(source, small, "latest")
    with pytest.raises(ConfigError):
        store.add(source, None, print)
    assert store.images() == [] and [path.name for path in store.directory.glob(".new-*")] == []


def test_what_a_killed_import_left_goes_with_the_next_one(layers: list[bytes], tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    (tmp_path / "images" / ".new-dead" / "image" / "rootfs").mkdir(parents=True)
    (tmp_path / "images" / "sha256-unnamed" / "rootfs").mkdir(parents=True)
    source = image_files.write_docker_archive(tmp_path / "a.tar", [layers[1]], ["tiny"])
    with store._under_way() as alive:
        image = store.add(source, None, print)
        assert alive.is_dir(), "an import that is under way is left alone"
    assert sorted(path.name for path in store.directory.iterdir() if path.is_dir()) == [image.directory.name]
    shutil.rmtree(image.directory)


@pytest.mark.parametrize("locked", (".new-old", "sha256-held/rootfs", "sha256-held/meta.json"))
def test_what_a_process_of_any_version_uses_is_left_alone(locked: str, layers: list[bytes], tmp_path: Path) -> None:
    """An earlier version holds its locks on directories."""
    store = ImageStore(tmp_path / "images")
    for directory in (".new-old/image/rootfs", "sha256-held/rootfs", "sha256-free/rootfs"):
        (store.directory / directory).mkdir(parents=True)
    (store.directory / "sha256-held/meta.json").touch()
    source = image_files.write_docker_archive(tmp_path / "a.tar", [layers[1]], ["tiny"])
    opened = os.open(store.directory / locked, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_SH)
        image = store.add(source, None, print)
        left = {path.name for path in store.directory.iterdir() if path.is_dir()}
        assert left == {locked.partition("/")[0], image.directory.name}
    finally:
        os.close(opened)
    store.remove(image.reference)
    assert not [path for path in store.directory.iterdir() if path.is_dir()]


@pytest.fixture
def unsquashfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for the program on PATH."""
    image_files.write_unsquashfs(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")


_SLOW_TAR = """#!/bin/bash
PATH=/usr/bin:/bin
tar "$@" | head -c 3000000
touch {begun}
sleep 600
"""


async def test_an_import_that_is_killed_half_way_is_no_image(
    tmp_path: Path, cache: Path, gateway: GatewayProcess, box_of: Callable[[str], Any]
) -> None:
    tree, store = image_files.make_tree(tmp_path / "tree"), ImageStore(cache / "ratchet/images")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tar").write_text(_SLOW_TAR.format(begun=tmp_path / "begun"))
    (tmp_path / "bin/tar").chmod(0o755)
    add = "import sys; from pathlib import Path; from sandbox_gateway.image_store import ImageStore; "
    add += "ImageStore(Path(sys.argv[1])).add(Path(sys.argv[2]), 'cut', print)"
    command = [sys.executable, "-c", add, str(store.directory), str(tree)]
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    with subprocess.Popen(command, env=environment, cwd=CHECKOUT, start_new_session=True) as importing:

        async def is_half_done() -> bool:
            return (tmp_path / "begun").exists() and bool([*store.directory.glob(".new-*/image/rootfs/bin/bash")])

        await eventually(is_half_done)
        store.add(
            image_files.write_docker_archive(tmp_path / "a.tar", [image_files.make_layer([])], ["other"]), None, print
        )
        assert len([*store.directory.glob(".new-*")]) == 1, "an import that is under way is left alone"
        os.killpg(importing.pid, signal.SIGKILL)
    assert gateway.call("POST", "/sandboxes", json={"templateID": "cut"}).status_code == 404
    store.add(tree, "cut", print)
    assert not [*store.directory.glob(".new-*")]
    assert (await (await box_of("cut")).exec("cat /srv/from-image")).stdout == "image\n"


_SIF_SCRIPTS = {
    "10-docker2singularity.sh": """\
export PATH="/opt/tool:/usr/bin:/bin"
export FROM_IMAGE="${FROM_IMAGE:-"yes and = more"}"
""",
    "90-environment.sh": 'set -e\nexport GREETING="hello $FROM_IMAGE"\nPATH=/srv/definition:$PATH\nfalse\n',
    "94-appsbase.sh": "export FROM_IMAGE=wrong\n",
}


@pytest.mark.parametrize("has_profile", (True, False))
@pytest.mark.parametrize("has_config", (True, False))
async def test_a_sif_file_boots_as_its_image_says(
    has_config: bool,
    has_profile: bool,
    tmp_path: Path,
    cache: Path,
    gateway: GatewayProcess,
    unsquashfs: None,
    box_of: Callable[[str], Any],
) -> None:
    """Without a config, as one that was made of a directory, it has the environment of its scripts. None is run."""
    tree = image_files.make_tree(tmp_path / "tree")
    (tree / ".singularity.d/env").mkdir(parents=True)
    for name, text in _SIF_SCRIPTS.items():
        (tree / ".singularity.d/env" / name).write_text(f"#!/bin/sh\n{text}")
        os.chown(tree / ".singularity.d/env" / name, 1000, 1000)
    if not has_profile:
        (tree / "etc/profile").unlink()
    config = image_files.CONFIG if has_config else None
    sif = image_files.write_sif(tmp_path / "Tool.sif", image_files.tree_layer(tree), config)
    said: list[str] = []
    image = ImageStore(cache / "ratchet/images").add(sif, None, said.append)
    assert image.reference == "tool:latest" and said[-1].endswith("do not run: set -e; false")
    box = await box_of("tool")
    asked = 'echo "$FROM_IMAGE"; echo "$GREETING"; our-tool; echo "$PATH"'
    answer = (await box.exec(asked)).stdout.splitlines()
    assert answer[:3] == ["yes and = more", "hello yes and = more", "tool"]
    assert answer[3] == "/srv/definition:/opt/tool:/usr/bin:/bin:/opt/ratchet/bin"
    assert (await box.exec("echo $GREETING", env={"GREETING": "the caller's"})).stdout == "the caller's\n"
    plain = await _run_as_default_user(gateway, box, "id -u; pwd")
    assert plain.split() == (["1234", "/srv/work"] if has_config else ["0", "/root"])


def test_a_sif_file_with_new_settings_is_another_image(layers: list[bytes], tmp_path: Path, unsquashfs: None) -> None:
    store, found = ImageStore(tmp_path / "images"), []
    for user in ("", "1000", "1000", "1001"):
        sif = image_files.write_sif(tmp_path / "a.sif", layers[0], {"User": user})
        found.append(store.add(sif, None, print))
    assert [image.user for image in found] == ["", "1000", "1000", "1001"]
    assert len({image.digest for image in found}) == 3


@pytest.mark.parametrize("fault", ("encrypted", "cut", "hostile"))
def test_a_sif_file_that_cannot_be_read_is_refused(
    fault: str, layers: list[bytes], tmp_path: Path, unsquashfs: None
) -> None:
    sif = image_files.write_sif(tmp_path / "a.sif", layers[1], file_system=5 if fault == "encrypted" else 1)
    if fault == "cut":
        os.truncate(sif, 5000)
    elif fault == "hostile":
        with sif.open("r+b") as file:
            file.seek(88)
            file.write(b"\xff" * 16)
    with pytest.raises(ConfigError, match="apptainer build --sandbox" if fault == "encrypted" else "cannot be read"):
        ImageStore(tmp_path / "images").add(sif, None, print)


def test_a_sif_file_without_a_program_that_unpacks_it_is_refused(
    layers: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"squashfs-tools.*apptainer build --sandbox DIRECTORY a\.sif"):
        ImageStore(tmp_path / "images").add(image_files.write_sif(tmp_path / "a.sif", layers[1]), None, print)


@pytest.mark.parametrize("stem", ("image", "lock", "sif"))
def test_a_sif_file_may_have_any_name(stem: str, layers: list[bytes], tmp_path: Path, unsquashfs: None) -> None:
    sif = image_files.write_sif(tmp_path / f"{stem}.sif", layers[0])
    assert ImageStore(tmp_path / "images").add(sif, None, print).reference == f"{stem}:latest"


def test_forbidden_namespaces_are_no_fault_of_the_image(
    layers: list[bytes], tmp_path: Path, unsquashfs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_mode: object) -> None:
        raise PermissionError("played: no namespaces")

    monkeypatch.setattr(image_archive, "enter_own_namespaces", refuse)
    with pytest.raises(ConfigError, match="may not make user namespaces"):
        ImageStore(tmp_path / "images").add(image_files.write_sif(tmp_path / "a.sif", layers[0]), None, print)


def test_an_error_of_the_store_is_no_fault_of_the_image(layers: list[bytes], tmp_path: Path) -> None:
    source = image_files.write_docker_archive(tmp_path / "a.tar", layers, ["x"])
    with pytest.raises(ValueError, match="ours"), image_archive.open_image(source, None, tmp_path):
        raise ValueError("ours")


def test_probe_reports_this_machine(python_layer: Path) -> None:
    """Also in a process with exported traces, whose library starts a thread in each forked child."""
    traces = BatchSpanProcessor(InMemorySpanExporter())
    report = {protection.name: protection for protection in probe_machine()}
    assert report["bubblewrap"].on and report["user namespaces"].on and report["closed network"].on
    assert report["memory and process limits"].on == (cgroups.usable_version() != 0)
    assert not [*Path(cgroups.MOUNT).glob("*/ratchet-probe-*"), *Path(cgroups.MOUNT).glob("ratchet-probe-*")]
    traces.shutdown()


def test_the_host_image_copies_only_what_everybody_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "security"
    (source / "keys").mkdir(parents=True)
    for name, mode in (("limits.conf", 0o644), ("opasswd", 0o600), ("keys/of-a-group", 0o640)):
        (source / name).write_text("x")
        (source / name).chmod(mode)
    monkeypatch.setattr(images, "_ETC_COPIED", (str(source), str(source / "opasswd")))
    binds = dict(Catalogue(tmp_path / "state", None, {}, ()).plan("host").binds)
    etc = Path(next(made for made, target in binds.items() if target == "/etc"))
    copied = {str(path.relative_to(etc)) for path in etc.rglob("*") if path.is_file()}
    assert "security/limits.conf" in copied and not copied & {"opasswd", "security/opasswd", "security/keys/of-a-group"}
