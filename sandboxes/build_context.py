"""Dockerfiles of tasks: their build context as an archive, and the name of the image that is built from it.

The name is the digest of the context, so equal contexts share an image, and a changed one gets another. The archive
travels in the dataset's row (`metadata.build_context`), so that the image can be built wherever the store can be read.
"""

import base64
import gzip
import hashlib
import io
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ratchet.built_images import built_image

DOCKERFILE = "Dockerfile"
BUILD_CONTEXT = "build_context"
"""Key of a row's metadata; the import moves it out of the row into the store's table of the same name."""
MAX_CONTEXT_BYTES = 8 << 20
"""The largest size of one context's files; an import holds up to 200 contexts at a time."""
_MAX_TAR_BYTES = 4 * MAX_CONTEXT_BYTES
"""The largest size of the tar; many small files take more in headers than in contents."""
_GZIP = 31
"""`wbits` of zlib for the gzip format."""
_WORKDIR = re.compile(r"^\s*WORKDIR\s+\"?(/[^\s\"$]*)", re.IGNORECASE | re.MULTILINE)


@dataclass(slots=True, frozen=True)
class BuildContext:
    """`image`: the reference of the image. `archive`: tar.gz in base64. `workdir`: the last one of the Dockerfile that
    is an absolute path, None without one."""

    image: str
    archive: str
    workdir: str | None


def pack_build_context(directory: Path) -> BuildContext:
    """Pack a directory with a Dockerfile. Raises ValueError, with what was found, if it is too large."""
    size = sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())
    if size > MAX_CONTEXT_BYTES:
        raise ValueError(
            f"expected at most {MAX_CONTEXT_BYTES >> 20} MiB to build an image from, found {size >> 20} MiB; build it "
            "yourself, and name it by environment.docker_image"
        )
    if outside := next((path for path in sorted(directory.rglob("*")) if _leads_out(path, directory)), None):
        where = f"{outside.relative_to(directory)} -> {outside.readlink()}"
        raise ValueError(f"expected links inside of the folder, found {where}")
    packed = _pack(directory)
    found = _WORKDIR.findall((directory / DOCKERFILE).read_text(errors="replace"))
    archive = base64.b64encode(gzip.compress(packed, mtime=0)).decode()
    # Of the tar, because compressed bytes differ between versions of zlib.
    return BuildContext(built_image(hashlib.sha256(packed).hexdigest()), archive, found[-1] if found else None)


def check_build_context(image: str, archive: bytes) -> bytes:
    """Return the tar of an archive. Raises ValueError unless the image's name is its digest: else the author of one row
    could put other files under the name of another author's image."""
    try:
        tar = zlib.decompressobj(_GZIP).decompress(archive, _MAX_TAR_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"the files of image {image} are no gzip archive: {error}") from None
    if len(tar) > _MAX_TAR_BYTES or built_image(hashlib.sha256(tar).hexdigest()) != image:
        raise ValueError(f"image {image} is not named by the digest of its files")
    return tar


def unpack_build_context(image: str, archive: bytes, directory: Path) -> None:
    """Write an archive's files into a new directory. Raises ValueError if one is not the image's, or lies outside."""
    directory.mkdir()
    links: set[PurePosixPath] = set()
    with tarfile.open(fileobj=io.BytesIO(check_build_context(image, archive))) as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts or not links.isdisjoint(name.parents):
                raise ValueError(f"{member.name!r} of image {image} leads out of its folder")
            path = directory / name
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif member.issym():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(member.linkname)
                links.add(name)
            elif (content := tar.extractfile(member)) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
                path.chmod(member.mode & 0o755)
            if _leads_out(path, directory):
                raise ValueError(f"{member.name!r} of image {image} leads out of its folder")


def _leads_out(path: Path, directory: Path) -> bool:
    """Return whether a path is a link to what lies outside of the directory."""
    return path.is_symlink() and not (path.parent / path.readlink()).resolve().is_relative_to(directory.resolve())


def _pack(directory: Path) -> bytes:
    """Return a tar of the directory's files, links and directories, which depends on nothing but their contents."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(directory.rglob("*")):
            found = tar.gettarinfo(path, path.relative_to(directory).as_posix())
            if found is None or not (found.isreg() or found.issym() or found.isdir() or found.islnk()):
                continue  # a socket, for example
            found.uid = found.gid = 0
            found.uname = found.gname = ""
            found.mtime = 0
            found.mode = 0o755 if found.isdir() or found.mode & 0o100 else 0o644
            if path.is_file() and not path.is_symlink():
                found.type = tarfile.REGTYPE  # also the second name of a hard link
                found.linkname = ""
                content = path.read_bytes()
                found.size = len(content)
                tar.addfile(found, io.BytesIO(content))
            else:
                tar.addfile(found)
    return buffer.getvalue()
