"""Files of a row as text: tar.gz in base64, and the source archives that packages are published as.

Why here: repositories and tests travel inside rows, and equal files must give equal bytes, so that row digests do not follow the clock.
Called by: `harbor.py` and `recipes.py`.
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
    """`metadata.repository_archive` or `tests_archive`, in order of the names."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, file in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(file.content), 0o755 if file.executable else 0o644
            tar.addfile(info, io.BytesIO(file.content))
    return base64.b64encode(buffer.getvalue()).decode()


def unpack_archive(archive: Path) -> dict[str, File]:
    """Regular files below the archive's one top directory. Nothing is written anywhere."""
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
