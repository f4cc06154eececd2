"""Pack files into a row as tar.gz in base64, and unpack the source archives of packages.

Equal files give equal bytes, so that a row's digest does not depend on the time at which it was built.
"""

import base64
import gzip
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import DatasetError


@dataclass(slots=True, frozen=True)
class File:
    content: bytes
    executable: bool = False


def pack_archive(files: Mapping[str, File]) -> str:
    """Return the value of `metadata.repository_archive` or `tests_archive`; files are sorted by name."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, file in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(file.content)
            info.mode = 0o755 if file.executable else 0o644
            tar.addfile(info, io.BytesIO(file.content))
    return base64.b64encode(buffer.getvalue()).decode()


def read_packed(archive: str, name: str) -> str:
    """Return a text file of `metadata.tests_archive`, empty if the archive does not have it."""
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        member = tar.extractfile(name) if name in tar.getnames() else None
        return "" if member is None else member.read().decode(errors="replace")


def unpack_archive(archive: Path) -> dict[str, File]:
    """Return the regular files below the archive's top directory. Raises DatasetError for a path that leaves it."""
    found: dict[str, File] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, name = member.name.partition("/")
            if not member.isfile() or not name:
                continue
            if ".." in name.split("/") or name.startswith("/"):
                raise DatasetError(f"{archive}: {member.name!r} points out of the archive")
            content = tar.extractfile(member)
            assert content is not None
            found[name] = File(content.read(), bool(member.mode & 0o100))
    return found
