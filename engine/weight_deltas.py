"""Deltas of weight files: what a version at an address changed in a file of the version before.

After a small step most bfloat16 numbers are what they were, so a delta has the 16-bit words that differ, as the XOR of
both. A file is the XOR of the whole file that its chain begins with and of all deltas since, in any order.

A delta is one zstd stream. For each PIECE_BYTES of the file it holds twice, for the words at even and at odd places
(low and high halves of float32 numbers), the number of those that differ (4 bytes), their distances (4 bytes each: the
number of equal words between one and the one before) and their XOR (2 bytes each), all little endian. Of distances and
XORs come all lowest bytes first, then all next ones, and so on, because the high bytes are mostly zero. A file with an
odd number of bytes counts as one with a zero byte after it.

A file that is stored as a delta has a "chain" in its entry of the version's row, so that one row is enough to make it:

| link of the chain    | meaning                                                                         |
|----------------------|---------------------------------------------------------------------------------|
| first                | "version" has the whole file, with this "sha256" and so many "bytes"            |
| other                | "version" has a delta, with this "sha256" and so many "bytes"                   |
| other with 0 "bytes" | in "version" the file is the same as in the one before; nothing is stored       |
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from engine import adapter_files, weight_storage
from engine.policy_files import file_sha256
from ratchet.types import JsonObject

PIECE_BYTES = 8 << 20
MAX_SHARE = 0.7
"""A delta that is larger than this share of its file is not stored: the whole file then costs less."""
SUFFIX = ".delta"
"""Ending of the name of a stored delta, after the name of its file."""
_LEVEL = 1
"""The compression level of zstd. Level 3 takes longer, and the deltas are no smaller."""
_MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors for the description of the tensors."""
_WORD, _COUNT = np.dtype("<u2"), np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class LocalVersion:
    """A version with its files in `directory`. `files`: those of its row."""

    version: str
    directory: Path
    files: Sequence[JsonObject]


def with_deltas(after: LocalVersion, before: LocalVersion, deltas: Path, max_links: int) -> list[JsonObject]:
    """Return the files of `after`, with a chain for each that is stored as a delta, which is written to `deltas`.

    All files are stored whole if a chain would have more than `max_links` links, or if the version is an adapter. A
    file is stored whole if it has no predecessor of the same layout, if the predecessor has changed on the disk, or if
    the delta is not much smaller. Raises OSError if a file cannot be read or written.
    """
    chains = {file["name"]: _chain(before.version, file) for file in before.files}
    is_full = any(len(chain) >= max_links for chain in chains.values())
    if is_full or adapter_files.is_adapter(file["name"] for file in after.files):
        return list(after.files)
    deltas.mkdir(parents=True, exist_ok=True)
    sha256 = {file["name"]: file["sha256"] for file in before.files}
    described = []
    for file in after.files:
        name = file["name"]
        link = _link(after, before, file, sha256[name], deltas / f"{name}{SUFFIX}") if name in chains else None
        described.append(file if link is None else file | {"chain": [*chains[name], link]})
    return described


def upload(version: LocalVersion, deltas: Path, uri: str, stored: set[str]) -> None:
    """Copy to `uri` what is stored of a version: its deltas in `deltas`, and whole files. Raises WeightStorageError.

    `stored`: names that an earlier try has copied; this one adds those that it copies.
    """
    weight_storage.upload_version(version.directory, uri, [one for one in version.files if "chain" not in one], stored)
    names = [file["name"] for file in version.files if "chain" in file and file["chain"][-1]["bytes"]]
    weight_storage.upload_version(deltas, uri, [{"name": f"{name}{SUFFIX}"} for name in names], stored)


def stored_bytes(files: Sequence[JsonObject]) -> int:
    """Return the number of bytes that a version stores of its own."""
    return sum(file["chain"][-1]["bytes"] if "chain" in file else file["bytes"] for file in files)


def write_delta(before: Path, sha256: str, after: Path, delta: Path) -> bool:
    """Write what differs between two .safetensors files; return whether `delta` is complete and worth storing.

    `sha256`: of the file before, as it should be. Raises OSError.
    """
    most = MAX_SHARE * after.stat().st_size
    if before.stat().st_size != after.stat().st_size or _header(before) != _header(after):
        return False
    digest = hashlib.sha256()
    with (
        before.open("rb") as old,
        after.open("rb") as new,
        delta.open("wb") as stored,
        zstandard.ZstdCompressor(_LEVEL).stream_writer(stored, closefd=False) as packed,
    ):
        while piece := new.read(PIECE_BYTES):
            earlier = old.read(len(piece))
            digest.update(earlier)
            changes = _words(piece) ^ _words(earlier)
            differs = changes != 0  # NumPy finds places in booleans faster than in numbers
            for start in (0, 1):
                places = np.flatnonzero(differs[start::2])
                packed.write(np.array(len(places), _COUNT).tobytes())
                packed.write(_apart(np.diff(places, prepend=-1).astype(_COUNT) - 1))
                packed.write(_apart(changes[start::2][places]))
            if stored.tell() > most:
                return False
    return digest.hexdigest() == sha256 and delta.stat().st_size <= most


def apply_deltas(whole: Path, deltas: Sequence[Path], file: Path) -> str:
    """Write `file`: `whole` with all deltas applied, in any order. Return its sha256.

    Raises OSError; ValueError, IndexError or ZstdError if a delta is damaged or of another file.
    """
    digest = hashlib.sha256()
    with ExitStack() as stack:
        source, target = stack.enter_context(whole.open("rb")), stack.enter_context(file.open("wb"))
        readers = [stack.enter_context(zstandard.open(delta, "rb")) for delta in deltas]
        while piece := source.read(PIECE_BYTES):
            words = _words(piece).copy()
            for reader, half in product(readers, (words[::2], words[1::2])):
                count = int(_read(reader, _COUNT, 1)[0])
                places = np.cumsum(_read(reader, _COUNT, count) + 1, dtype=np.int64) - 1
                half[places] ^= _read(reader, _WORD, count)
            made = words.tobytes()[: len(piece)]
            digest.update(made)
            target.write(made)
    return digest.hexdigest()


def _chain(version: str, file: JsonObject) -> list[JsonObject]:
    whole = {"version": version, "sha256": file["sha256"], "bytes": file["bytes"]}
    return list(file.get("chain", [whole]))


def _link(after: LocalVersion, before: LocalVersion, file: JsonObject, sha256: str, delta: Path) -> JsonObject | None:
    """Return the link of a file whose predecessor has this digest, None if it is stored whole."""
    name = file["name"]
    if file["sha256"] == sha256:
        return {"version": after.version, "bytes": 0}
    is_tensors = name.endswith(".safetensors")
    if not is_tensors or not write_delta(before.directory / name, sha256, after.directory / name, delta):
        return None
    return {"version": after.version, "sha256": file_sha256(delta), "bytes": delta.stat().st_size}


def _header(path: Path) -> bytes:
    """Return the names, types, shapes and places of the tensors, as they are in the file."""
    with path.open("rb") as file:
        return file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))


def _words(piece: bytes) -> NDArray[np.uint16]:
    return np.frombuffer(piece + bytes(len(piece) % 2), _WORD)


def _apart(numbers: NDArray[Any]) -> bytes:
    """Return all lowest bytes of the numbers, then all next ones, and so on."""
    return numbers.view(np.uint8).reshape(-1, numbers.itemsize).T.tobytes()


def _read(reader: BinaryIO, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Return so many numbers that `_apart` has written."""
    planes = np.frombuffer(reader.read(count * dtype.itemsize), np.uint8).reshape(dtype.itemsize, count)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(count)
