"""Policy versions at an address of fsspec, such as s3://BUCKET/DIRECTORY: upload, read, list, delete.

A version's files lie at ADDRESS/RUN/STEP.eEPOCH. Its row in Postgres, written after the upload, says that it is
complete and has the digests. fsspec's back ends read endpoints and credentials from the environment
(docs/fleet.md, "Weights"); none is stored here.
"""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ratchet.errors import ConfigError, WeightStorageError
from ratchet.secrets import without_secrets
from ratchet.types import JsonObject

RANGE_BYTES = 8 << 20
RANGES_AT_ONCE = 8
FILES_AT_ONCE = 4
"""Files that are uploaded side by side. They are read one after the other, at most RANGE_BYTES x RANGES_AT_ONCE of one
in memory."""

_EXTRAS = {"s3": "s3", "gs": "gs", "gcs": "gs"}
"""Scheme -> extra of this package with which its back end is installed."""


class DamagedVersionError(WeightStorageError):
    """A stored file has another size or digest than its row says."""


class _Place(NamedTuple):
    """A back end of fsspec, and a path as that back end writes it."""

    storage: Any
    path: str


def check_address(key: str, address: str) -> None:
    """Raise ConfigError, naming the config's `key`, if the address has no scheme that can be used here."""
    scheme, separator, rest = address.partition("://")
    if not separator or not rest.strip("/"):
        raise ConfigError(f"{key}: expected an address with a scheme, such as s3://BUCKET/DIRECTORY, found {address!r}")
    if "@" in rest or "?" in rest:
        raise ConfigError(
            f"{key}: the address has a user or parameters, and configs are stored in Postgres; give credentials in the "
            'environment of the engines, the learner and the workers (docs/fleet.md, "Weights")'
        )
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        known = "s3, gs, file, or another that fsspec knows"
        raise ConfigError(f"{key}: {address!r} has the unknown scheme {scheme!r}; expected {known}") from None
    except ImportError as error:
        how = f' with `make environment EXTRA="cpu --extra {_EXTRAS[scheme]}"`' if scheme in _EXTRAS else ""
        raise ConfigError(
            f"{key}: {scheme}:// needs a package that is not installed ({error}); install it on every host{how}"
        ) from None


def version_address(address: str, version: str) -> str:
    """Return the address of a version, below that of all versions."""
    return f"{address.rstrip('/')}/{version}"


def upload_version(directory: Path, uri: str, files: Sequence[JsonObject], stored: set[str] | None = None) -> None:
    """Copy a version's files to `uri`, replacing what is there. Raises WeightStorageError.

    `stored`: names of files that an earlier try has copied, which this one leaves out; it adds those that it copies.
    """
    done = set() if stored is None else stored
    with storage_errors(uri):
        place = _open(uri)
        if "file" in _protocols(place):
            place.storage.makedirs(place.path, exist_ok=True)

        def upload(name: str) -> None:
            place.storage.put_file(str(directory / name), f"{place.path}/{name}")
            done.add(name)

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(upload, [file["name"] for file in files if file["name"] not in done]))


def read_file(uri: str, start: int, size: int) -> Iterator[bytes]:
    """Yield the contents of a stored file of `size` bytes from `start` on, several ranges at once.

    Raises DamagedVersionError if the file has another size, else WeightStorageError.
    """
    with storage_errors(uri):
        place = _open(uri)
        place.storage.invalidate_cache()
        found = place.storage.info(place.path)["size"]
    if found != size:
        raise DamagedVersionError(f"{uri} has {found} bytes, expected {size}")
    while start < size:
        starts = list(range(start, size, RANGE_BYTES))[:RANGES_AT_ONCE]
        ends = [min(one + RANGE_BYTES, size) for one in starts]
        with storage_errors(uri):
            pieces = place.storage.cat_ranges([place.path] * len(starts), starts, ends, on_error="raise")
        if sum(map(len, pieces)) != ends[-1] - start:
            raise WeightStorageError(f"{uri}: the answer is shorter than the {ends[-1] - start} bytes asked for")
        yield from pieces
        start = ends[-1]


def list_versions(address: str, run_id: str) -> list[str]:
    """Return the names of a run's directories at the address. Raises WeightStorageError."""
    uri = version_address(address, run_id)
    with storage_errors(uri):
        place = _open(uri)
        place.storage.invalidate_cache()
        try:
            found = place.storage.ls(place.path, detail=False)
        except FileNotFoundError:
            return []
    return [path.rstrip("/").rpartition("/")[2] for path in found]


def delete_version(uri: str) -> None:
    """Delete a version's files, if there are any. Raises WeightStorageError."""
    with storage_errors(uri), contextlib.suppress(FileNotFoundError):
        place = _open(uri)
        place.storage.invalidate_cache()
        place.storage.rm(place.path, recursive=True)


def _open(uri: str) -> _Place:
    from fsspec.core import url_to_fs

    return _Place(*url_to_fs(uri))


def _protocols(place: _Place) -> tuple[str, ...]:
    found = place.storage.protocol
    return (found,) if isinstance(found, str) else tuple(found)


@contextlib.contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Raise WeightStorageError for any error of a back end; each has classes of its own."""
    try:
        yield
    except WeightStorageError:
        raise
    except Exception as error:
        reason = " ".join(without_secrets(str(error)).split())[:300]
        raise WeightStorageError(f"{uri}: {type(error).__name__}: {reason}") from error
