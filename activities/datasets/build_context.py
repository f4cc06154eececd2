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
from dataclasses import dataclass
from pathlib import Path

from ratchet.built_images import built_image

DOCKERFILE = "Dockerfile"
BUILD_CONTEXT = "build_context"
"""Key of a row's metadata; the import moves it out of the row into the store's table of the same name."""
MAX_CONTEXT_BYTES = 32 << 20
"""A larger context does not fit into a task's row."""
_WORKDIR = re.compile(r"^\s*WORKDIR\s+\"?(/[^\s\"$]*)", re.IGNORECASE | re.MULTILINE)


@dataclass(slots=True, frozen=True)
class BuildContext:
    """`image`: the reference of the image. `archive`: tar.gz in base64. `workdir`: the last one of the Dockerfile that
    is an absolute path, None without one.
    """

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
    packed = _pack(directory)
    found = _WORKDIR.findall((directory / DOCKERFILE).read_text(errors="replace"))
    archive = base64.b64encode(gzip.compress(packed, mtime=0)).decode()
    # Of the tar, because compressed bytes differ between versions of zlib.
    return BuildContext(built_image(hashlib.sha256(packed).hexdigest()), archive, found[-1] if found else None)


def unpack_build_context(archive: bytes, directory: Path) -> None:
    """Write the files of a packed context into a new directory."""
    directory.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")


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
                content = path.read_bytes()
                found.size = len(content)
                tar.addfile(found, io.BytesIO(content))
            else:
                tar.addfile(found)
    return buffer.getvalue()
