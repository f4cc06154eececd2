"""Build contexts of images: equal files give equal names, and a change gives another name."""

import base64
import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from ratchet.built_images import build_workflow_id, built_image, is_built
from sandboxes import build_context
from sandboxes.build_context import check_build_context, pack_build_context, unpack_build_context


def write(directory: Path, dockerfile: str = "FROM x\nWORKDIR /srv/app\n") -> Path:
    directory.mkdir()
    (directory / "Dockerfile").write_text(dockerfile)
    (directory / "run.sh").write_text("true\n")
    (directory / "run.sh").chmod(0o755)
    (directory / "deep").mkdir()
    (directory / "deep" / "data").write_bytes(b"\x00\xff")
    (directory / "link").symlink_to("deep/data")
    return directory


def test_a_copy_of_the_files_has_the_same_name(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    os.utime(two / "run.sh", (1, 1))
    (two / "Dockerfile").chmod(0o600)
    first, second = pack_build_context(one), pack_build_context(two)
    assert first == second and is_built(first.image)
    assert build_workflow_id(first.image) == f"image/{first.image.partition(':')[2]}"


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: (directory / "deep" / "data").write_bytes(b"\x00"),
        lambda directory: (directory / "run.sh").chmod(0o644),
        lambda directory: (directory / ".dockerignore").write_text("deep"),
        lambda directory: (directory / "deep" / "data").rename(directory / "deep" / "other"),
        lambda directory: ((directory / "link").unlink(), (directory / "link").symlink_to("run.sh")),
    ],
)
def test_a_change_gives_another_name(tmp_path: Path, change: object) -> None:
    directory = write(tmp_path / "one")
    before = pack_build_context(directory).image
    change(directory)  # type: ignore[operator]
    assert pack_build_context(directory).image != before


def test_the_archive_has_files_modes_and_links(tmp_path: Path) -> None:
    archive = base64.b64decode(pack_build_context(write(tmp_path / "one")).archive)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = {member.name: (member.mode, member.linkname) for member in tar}
    assert found == {
        "Dockerfile": (0o644, ""),
        "deep": (0o755, ""),
        "deep/data": (0o644, ""),
        "link": (0o755, "deep/data"),
        "run.sh": (0o755, ""),
    }


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM x\n", None),
        ("FROM x\nworkdir /a\nWORKDIR /b/c \n", "/b/c"),
        ('FROM x\nWORKDIR "/a"\n', "/a"),
        ("FROM x\nWORKDIR $HOME\nWORKDIR deep\n", None),
    ],
)
def test_the_last_absolute_workdir_counts(tmp_path: Path, dockerfile: str, workdir: str | None) -> None:
    assert pack_build_context(write(tmp_path / "one", dockerfile)).workdir == workdir


def test_a_context_that_is_too_large_is_refused_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_context, "MAX_CONTEXT_BYTES", 1 << 20)
    directory = write(tmp_path / "one")
    (directory / "big").write_bytes(bytes(2 << 20))
    with pytest.raises(ValueError, match=r"at most 1 MiB .* found 2 MiB"):
        pack_build_context(directory)


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "one")
    (directory / "deep" / "out").symlink_to("../../elsewhere")
    with pytest.raises(ValueError, match=r"deep/out -> \.\./\.\./elsewhere"):
        pack_build_context(directory)


def test_what_is_packed_is_unpacked(tmp_path: Path) -> None:
    packed = pack_build_context(write(tmp_path / "one"))
    unpack_build_context(packed.image, base64.b64decode(packed.archive), tmp_path / "two")
    assert pack_build_context(tmp_path / "two") == packed


def test_an_archive_under_another_images_name_is_refused(tmp_path: Path) -> None:
    """Else one author's row could replace the image of another author's task."""
    honest = pack_build_context(write(tmp_path / "one"))
    other = pack_build_context(write(tmp_path / "two", "FROM evil\n"))
    for archive in (base64.b64decode(other.archive), b"no gzip", gzip.compress(bytes(200 << 20))):
        with pytest.raises(ValueError, match=r"is not named by the digest|are no gzip archive"):
            check_build_context(honest.image, archive)


@pytest.mark.parametrize(
    "members",
    [
        [("../evil", tarfile.REGTYPE, "")],
        [("/etc/evil", tarfile.REGTYPE, "")],
        [("link", tarfile.SYMTYPE, "/etc"), ("link/evil", tarfile.REGTYPE, "")],
        [("link", tarfile.SYMTYPE, "."), ("link/evil", tarfile.REGTYPE, "")],
        [("deep", tarfile.DIRTYPE, ""), ("deep/link", tarfile.SYMTYPE, "../../evil")],
    ],
)
def test_members_that_lead_out_are_refused(tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = target
            tar.addfile(member)
    image = built_image(hashlib.sha256(buffer.getvalue()).hexdigest())
    with pytest.raises(ValueError, match="leads out of its folder"):
        unpack_build_context(image, gzip.compress(buffer.getvalue()), tmp_path / "out")
