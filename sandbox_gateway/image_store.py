"""Imported images on this machine: unpacked trees by digest, and a catalogue that maps references to them.

An import is slow and started by a person; creating a box is fast and never pulls. The two run in different processes
at the same time and share only this directory.

    <directory>/catalogue.json          reference → name of a tree
    <directory>/<digest>/rootfs         the tree; boxes mount it read-only
    <directory>/<digest>/meta.json      `ImageFacts`; boxes hold a shared lock on it
    <directory>/.new-*                  an import in progress; `lock` in it is locked while its process lives

Several hosts may share the directory. Locks are on files, because NFS keeps those on directories to each host.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ratchet.errors import ConfigError
from sandbox_gateway.fork_client import remove_tree
from sandbox_gateway.image_archive import ImageSource, familiar, open_image
from sandbox_gateway.image_unpack import unpack

BUILT_IN_REFERENCES = ("host", "base")
ROOTFS, META = "rootfs", "meta.json"
_CATALOGUE, _LOCK, _UNDER_WAY, _LOCK_OF_IMPORT = "catalogue.json", "catalogue.lock", ".new-", "lock"
_MAX_LEFT_OUT = 1000
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}")


class ImageFacts(BaseModel):
    """`digest` of the image's config, or of the tree's tar stream and the settings, which are the image's."""

    model_config = ConfigDict(frozen=True)

    digest: str = ""
    source: str = ""
    imported_at: float = 0.0
    """Unix seconds."""
    size_bytes: int = 0
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str = ""
    user: str = ""


class Image(ImageFacts):
    reference: str
    directory: Path


class ImageStore:
    """The store of one directory. Every call reads the disk, because several processes may use the directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, reference: str) -> Path | None:
        """Return the directory of an image's tree and facts; docker's long and short forms of a name are the same."""
        name = self._read().get(familiar(reference))
        return self.directory / name if name is not None else None

    def images(self) -> list[Image]:
        return [self._image(reference, name) for reference, name in sorted(self._read().items())]

    def add(self, path: Path, name: str | None, say: Callable[[str], None]) -> Image:
        """Import a directory, tar, OCI layout, OCI archive, docker-archive or SIF file under a reference. Idempotent:
        an existing tree only gets the reference. Raises ConfigError for input that is not an image."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._under_way() as fresh, open_image(path, name, fresh) as source:
            reference, made, digest = _reference(name, source, path), fresh / "image", source.digest
            if digest is None or not self._directory(digest).is_dir():
                say(f"unpacking {len(source.layers)} layer(s) of {path}")
                digest = _unpack_into(made, source, path, say)
            with self._locked() as catalogue:
                directory = self._directory(digest)
                if not directory.is_dir():
                    made.rename(directory)
                catalogue[reference] = directory.name
        self._remove_unnamed()
        return self._image(reference, directory.name)

    def remove(self, reference: str) -> bool:
        """Remove the reference, and the tree with its last reference.

        Returns False if boxes still use the tree; a later import or removal deletes it then. Raises ConfigError for an
        unknown reference.
        """
        if reference in BUILT_IN_REFERENCES:
            raise ConfigError(f"{reference} is built in and cannot be removed")
        with self._locked() as catalogue:
            name = catalogue.pop(familiar(reference), None)
            if name is None:
                raise ConfigError(f"no image {reference!r}; `ratchet tasks images list` shows what there is")
            still_named = name in catalogue.values()
        self._remove_unnamed()
        return still_named or not (self.directory / name).exists()

    def _image(self, reference: str, name: str) -> Image:
        directory = self.directory / name
        return Image(reference=reference, directory=directory, **read_facts(directory).model_dump())

    def _directory(self, digest: str) -> Path:
        return self.directory / digest.replace(":", "-")

    def _read(self) -> dict[str, str]:
        try:
            return dict(json.loads((self.directory / _CATALOGUE).read_bytes()))
        except FileNotFoundError:
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, str]]:
        """Yield the catalogue under its lock and write it back atomically at the end."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.directory / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            catalogue = self._read()
            yield catalogue
            fresh = self.directory / f"{_CATALOGUE}.new"
            fresh.write_text(json.dumps(catalogue, indent=1, sort_keys=True))
            fresh.replace(self.directory / _CATALOGUE)

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[Path]:
        """Yield a directory for one import, locked while this process lives; the next import clears one that is not."""
        with contextlib.ExitStack() as held:
            with self._locked():  # else another import may clear the directory before it is locked
                fresh = Path(tempfile.mkdtemp(prefix=_UNDER_WAY, dir=self.directory))
                held.enter_context(_lock(fresh, fresh / _LOCK_OF_IMPORT))
            try:
                yield fresh
            finally:
                remove_tree(fresh)

    def _remove_unnamed(self) -> None:
        """Remove trees without a reference that no box uses, and leftovers of killed imports."""
        with self._locked() as catalogue:
            for entry in list(self.directory.iterdir()):
                under_way = entry.name.startswith(_UNDER_WAY)
                if not entry.is_dir() or entry.name in catalogue.values():
                    continue
                # An earlier version locks the directory.
                files = (entry, entry / _LOCK_OF_IMPORT) if under_way else (entry / ROOTFS, entry / META)
                # An import that ends removes its own directory at any time.
                with contextlib.suppress(FileNotFoundError), _lock(*files) as free:
                    if free:
                        remove_tree(entry)


def _unpack_into(directory: Path, source: ImageSource, path: Path, say: Callable[[str], None]) -> str:
    rootfs = directory / ROOTFS
    rootfs.mkdir(parents=True)
    unpacked = unpack(source, rootfs)
    if left_out := "; ".join(unpacked.left_out)[:_MAX_LEFT_OUT]:
        say(f"not taken over from the scripts of the image's environment, which boxes do not run: {left_out}")
    settings = [unpacked.env, source.workdir, source.user]
    digest = source.digest or unpacked.digest
    if source.digest is None and any(settings):
        digest = "sha256:" + hashlib.sha256(json.dumps([digest, *settings], sort_keys=True).encode()).hexdigest()
    facts = ImageFacts(
        digest=digest,
        source=str(path.resolve()),
        imported_at=time.time(),
        size_bytes=_size_bytes(rootfs),
        env=unpacked.env,
        workdir=source.workdir,
        user=source.user,
    )
    (directory / META).write_text(facts.model_dump_json(indent=1))
    return facts.digest


def read_facts(directory: Path) -> ImageFacts:
    return ImageFacts.model_validate_json((directory / META).read_bytes())


def _reference(name: str | None, source: ImageSource, path: Path) -> str:
    wanted = name or next(iter(source.names), None)
    if wanted is None:
        raise ConfigError(f"{path} does not say what its image is called; give it a reference with --name")
    if wanted in BUILT_IN_REFERENCES:
        raise ConfigError(f"{wanted} is the name of a built-in image; give another one with --name")
    if not _REFERENCE.fullmatch(wanted):
        raise ConfigError(f"{wanted!r} cannot be a reference; give one such as team/image:tag with --name")
    return familiar(wanted)


@contextlib.contextmanager
def _lock(*paths: Path) -> Iterator[bool]:
    """Yield whether the exclusive locks on all were acquired; never waits. A file that is missing is made."""
    with contextlib.ExitStack() as held:
        free = True
        for path in paths:
            opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)
            held.callback(os.close, opened)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
        yield free


def _size_bytes(tree: Path) -> int:
    """Return the tree's size on disk; hard links count once."""
    seen: dict[int, int] = {}
    for directory, _names, files in os.walk(tree):
        for name in files:
            found = os.lstat(os.path.join(directory, name))
            seen[found.st_ino] = found.st_blocks * 512
    return sum(seen.values())
