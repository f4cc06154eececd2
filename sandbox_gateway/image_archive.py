"""Read images in all supported forms as layers and a config: a directory, a tar, an OCI layout or archive, a
docker-archive, a SIF file.

Formats: OCI image layout 1.1 (`index.json`, `blobs/`), and what `docker save` writes (`manifest.json`). Everything
else is read as a single layer.
"""

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import platform
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import zstandard

from ratchet.errors import ConfigError
from sandbox_gateway.boxd.id_modes import enter_own_namespaces, id_mode

_MAX_JSON_BYTES = 16 << 20
_MAX_INDEX_DEPTH = 4
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_SIF_MAGIC, _SIF_NUM_AND_OFFSET, _SIF_MAX_OBJECTS = b"SIF_MAGIC", 88, 4096
_SIF_OBJECT = struct.Struct("<i?3I7Q128s2i376x")
_SIF_PARTITION, _SIF_JSON, _SIF_CONFIG = 0x4004, 0x4006, b"oci-config.json"
_SIF_SQUASHFS_OF_SYSTEM = (1, 2)  # kind of file system, use of the partition
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_UNREADABLE = (tarfile.TarError, struct.error, ValueError, LookupError, TypeError)

Open = Callable[[str], AbstractContextManager[io.BufferedReader]]
"""Opens a file of the archive by name. Raises KeyError or OSError if it does not exist."""


@dataclass(frozen=True, slots=True)
class Layer:
    name: str
    open: Callable[[], AbstractContextManager[io.BufferedReader]]
    """Opens the layer as stored, compressed or not; see `decompressed`."""
    diff_id: str | None
    """SHA-256 of the uncompressed stream according to the config, None if the config has none."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """`digest`: of the config, None for a plain tree. `names`: the image's names in the archive."""

    layers: list[Layer]
    digest: str | None = None
    names: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""


@contextlib.contextmanager
def open_image(path: Path, wanted: str | None, scratch: Path) -> Iterator[ImageSource]:
    """Open the image `wanted`, which selects one of several in an archive. A compressed archive is unpacked into
    `scratch`.

    Raises ConfigError for input that is not an image.
    """
    with contextlib.ExitStack() as held:
        with blamed(str(path)):
            if path.is_dir():
                source = _from_directory(path, wanted)
            elif _is_sif(path):
                source = _from_sif(path, scratch / "sif")
            else:
                file = held.enter_context(_plain_file(path, scratch))
                source = _from_archive(held.enter_context(tarfile.open(fileobj=file, mode="r:")), path, wanted)
        yield source


@contextlib.contextmanager
def blamed(name: str) -> Iterator[None]:
    """Turn errors of reading the image or layer of this name into ConfigError."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(f"{name}: there is no {error.filename or error}") from error
    except subprocess.SubprocessError as error:  # in `preexec_fn`
        raise ConfigError(f"{name}: this user may not make user namespaces; see `ratchet doctor`") from error
    except _UNREADABLE as error:
        raise ConfigError(f"{name} cannot be read as an image: {error}") from error


def decompressed(stream: io.BufferedReader) -> io.BufferedReader:
    """Choose the decompression by the first bytes: media types are often wrong, and a docker-archive gives none."""
    start = stream.peek(8)[:8]
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
    if kind == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=stream))
    if kind == "bzip2":
        return io.BufferedReader(bz2.BZ2File(stream))
    if kind == "xz":
        return io.BufferedReader(lzma.LZMAFile(stream))
    if kind == "zstd":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True))
    return stream


@contextlib.contextmanager
def _plain_file(path: Path, scratch: Path) -> Iterator[io.BufferedReader]:
    """Yield the archive without its outer compression, because images are read out of order."""
    with path.open("rb") as stream:
        plain = decompressed(stream)
        if plain is stream:
            yield stream
            return
        with tempfile.TemporaryFile(dir=scratch) as copy:
            try:
                shutil.copyfileobj(plain, copy, 1 << 20)
            except (OSError, EOFError, zstandard.ZstdError, lzma.LZMAError) as error:
                raise ConfigError(f"{path} cannot be decompressed: {error}") from error
            copy.seek(0)
            yield cast(io.BufferedReader, copy)


def _from_directory(path: Path, wanted: str | None) -> ImageSource:
    if (path / "oci-layout").is_file() and (path / "index.json").is_file():
        return _from_oci(lambda name: (path / name).open("rb"), wanted, str(path))
    return ImageSource([Layer(str(path), lambda: _packed(path), None)], names=[path.resolve().name.lower()])


def _from_archive(archive: tarfile.TarFile, path: Path, wanted: str | None) -> ImageSource:
    # Some tools write `./index.json`.
    names = {name.removeprefix("./"): name for name in archive.getnames()}

    def open_member(name: str) -> AbstractContextManager[io.BufferedReader]:
        member = archive.extractfile(names[name])
        if member is None:
            raise KeyError(f"{name} is no file")
        return cast(io.BufferedReader, member)

    if "manifest.json" in names:
        manifest = _read_json(open_member, "manifest.json")
        if isinstance(manifest, list):
            return _from_docker(open_member, manifest, wanted, str(path))
    if "index.json" in names and "oci-layout" in names:
        return _from_oci(open_member, wanted, str(path))
    stem = path.name.lower().split(".tar")[0].removesuffix(".tgz")
    return ImageSource([Layer(path.name, lambda: _reopened(archive), None)], names=[stem])


def _reopened(archive: tarfile.TarFile) -> AbstractContextManager[io.BufferedReader]:
    """Return the archive's own file, from its start."""
    assert archive.fileobj is not None, "an open archive has a file"
    archive.fileobj.seek(0)
    return contextlib.nullcontext(cast(io.BufferedReader, archive.fileobj))


def _is_sif(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64)[32:].startswith(_SIF_MAGIC)


def _from_sif(path: Path, tree: Path) -> ImageSource:
    """Unpack an image of Apptainer or Singularity into `tree`. One that was made of an OCI image keeps its config.
    Format: header, descriptors and objects of version 01 in apptainer/sif, `pkg/sif`. Raises ConfigError."""
    offset, config = None, {}
    with path.open("rb") as file:
        num_objects, start = struct.unpack_from("<2Q", file.read(128), _SIF_NUM_AND_OFFSET)
        file.seek(start)
        for found in _SIF_OBJECT.iter_unpack(file.read(min(num_objects, _SIF_MAX_OBJECTS) * _SIF_OBJECT.size)):
            kind, is_used, at, size, name = found[0], found[1], found[5], found[6], found[12]
            if is_used and kind == _SIF_PARTITION and found[13:] == _SIF_SQUASHFS_OF_SYSTEM:
                offset = at
            elif is_used and kind == _SIF_JSON and name.rstrip(b"\0") == _SIF_CONFIG:
                file.seek(at)
                config = dict(json.loads(file.read(min(size, _MAX_JSON_BYTES))))
    remedy = f"make a directory of it with `apptainer build --sandbox DIRECTORY {path.name}`, and import that"
    if offset is None:
        raise ConfigError(f"{path} has no plain squashfs, as an encrypted or an OCI-SIF file has none; {remedy}")
    if shutil.which("unsquashfs") is None:
        raise ConfigError(f"{path} is a SIF file; install unsquashfs (package squashfs-tools), or {remedy}")
    command = ["unsquashfs", "-no-xattrs", "-o", str(offset), "-d", str(tree), str(path)]
    # As root of its own namespaces an ordinary user gives files to its subordinate ids, and reads those without u+r.
    prepare = partial(enter_own_namespaces, id_mode())
    done = subprocess.run(command, preexec_fn=prepare, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2):  # 2: it could not make devices or set attributes, which boxes lack anyway
        raise ConfigError(f"{path} cannot be unpacked: {done.stderr.strip()[-400:]}")
    layer = Layer(str(path), lambda: _packed(tree, prepare), None)
    return ImageSource([layer], names=[path.stem.lower()], **_settings(config))


@contextlib.contextmanager
def _packed(directory: Path, prepare: Callable[[], None] | None = None) -> Iterator[io.BufferedReader]:
    """Yield a directory as a tar in an order that does not depend on the disk. `prepare`: done first in the child."""
    options = ["--sort=name", "--numeric-owner", "--format=posix", "--pax-option=delete=atime,delete=ctime"]
    with contextlib.ExitStack() as held:
        if prepare is None and os.geteuid() != 0:
            # What an ordinary user owns is root's in the image: its number may be the agent's in a box.
            for kind, number in (("owner", os.geteuid()), ("group", os.getegid())):
                mapping = held.enter_context(tempfile.NamedTemporaryFile("w"))
                print(f"+{number} +0", file=mapping, flush=True)
                options.append(f"--{kind}-map={mapping.name}")
        command = ["tar", *options, "-C", str(directory), "-cf", "-", "."]
        pipe = subprocess.PIPE
        process = held.enter_context(subprocess.Popen(command, stdout=pipe, stderr=pipe, preexec_fn=prepare))
        assert process.stdout is not None and process.stderr is not None, "both are pipes"
        yield cast(io.BufferedReader, process.stdout)
        process.stdout.close()
        problem = process.stderr.read().decode(errors="replace").strip()
    if process.returncode != 0:
        raise ConfigError(f"{directory} cannot be packed; make it readable, or import a tar of it: {problem[-400:]}")


def _from_docker(open_file: Open, manifest: list[Any], wanted: str | None, where: str) -> ImageSource:
    candidates = [(list(entry.get("RepoTags") or []), entry) for entry in manifest]
    names, entry = _choose(candidates, wanted, where)
    with open_file(entry["Config"]) as stream:
        raw = stream.read(_MAX_JSON_BYTES)
    return _image(raw, [(name, partial(open_file, name)) for name in entry["Layers"]], names)


def _from_oci(open_file: Open, wanted: str | None, where: str) -> ImageSource:
    candidates = []
    for descriptor in _read_json(open_file, "index.json")["manifests"]:
        names = [name for key in _NAME_ANNOTATIONS if (name := descriptor.get("annotations", {}).get(key))]
        candidates.append((names[:1], descriptor))
    names, descriptor = _choose(candidates, wanted, where)
    manifest = _read_blob(open_file, descriptor)
    for _ in range(_MAX_INDEX_DEPTH):
        if "manifests" not in manifest:
            break
        manifest = _read_blob(open_file, _of_this_machine(manifest["manifests"], where))
    raw = _read_verified(open_file, manifest["config"])
    blobs = [_blob_path(layer) for layer in manifest["layers"]]
    full = [name for name in names if re.search("[/:]", name)]  # a bare tag is not a name
    return _image(raw, [(name, partial(open_file, name)) for name in blobs], full)


def _image(
    raw_config: bytes,
    layers: list[tuple[str, Callable[[], AbstractContextManager[io.BufferedReader]]]],
    names: list[str],
) -> ImageSource:
    parsed = json.loads(raw_config)
    diff_ids = parsed["rootfs"]["diff_ids"]
    if len(diff_ids) != len(layers):
        raise ConfigError(f"the image's config names {len(diff_ids)} layers and its manifest {len(layers)}")
    return ImageSource(
        layers=[Layer(name, opened, diff_id) for (name, opened), diff_id in zip(layers, diff_ids, strict=True)],
        digest="sha256:" + hashlib.sha256(raw_config).hexdigest(),
        names=names,
        **_settings(parsed.get("config") or {}),
    )


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ImageSource that an OCI image's config sets for its processes."""
    pairs = [entry.partition("=") for entry in config.get("Env") or []]
    return {
        "env": {name: value for name, _, value in pairs if name},
        "workdir": str(config.get("WorkingDir") or ""),
        "user": str(config.get("User") or ""),
    }


def _choose(
    candidates: list[tuple[list[str], dict[str, Any]]], wanted: str | None, where: str
) -> tuple[list[str], dict[str, Any]]:
    """Return the archive's image; if there are several, the one named `wanted`."""
    if len(candidates) == 1:
        return candidates[0]
    if wanted is not None:
        for names, entry in candidates:
            if any(familiar(name) == familiar(wanted) for name in names):
                return [wanted], entry
    held = ", ".join(name for names, _entry in candidates for name in names) or "without names"
    raise ConfigError(f"{where} holds {len(candidates)} images ({held}); choose one with --name")


def _of_this_machine(descriptors: list[dict[str, Any]], where: str) -> dict[str, Any]:
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    platforms = [descriptor.get("platform") or {} for descriptor in descriptors]
    for descriptor, found in zip(descriptors, platforms, strict=True):
        if found.get("os", "linux") == "linux" and found.get("architecture", wanted) == wanted:
            return descriptor
    held = ", ".join(f"{found.get('os')}/{found.get('architecture')}" for found in platforms)
    raise ConfigError(f"{where} has no image for linux/{wanted}, only for {held}")


def _blob_path(descriptor: dict[str, Any]) -> str:
    match = _DIGEST.fullmatch(descriptor["digest"])
    if match is None:
        raise ConfigError(f"a blob's digest is no SHA-256: {descriptor['digest']!r}")
    return f"blobs/sha256/{match[1]}"


def _read_blob(open_file: Open, descriptor: dict[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(_read_verified(open_file, descriptor)))


def _read_verified(open_file: Open, descriptor: dict[str, Any]) -> bytes:
    path = _blob_path(descriptor)
    with open_file(path) as stream:
        raw = stream.read(_MAX_JSON_BYTES)
    if hashlib.sha256(raw).hexdigest() != path.rpartition("/")[2]:
        raise ConfigError(f"{path} is damaged: its content has another digest")
    return raw


def _read_json(open_file: Open, name: str) -> Any:
    with open_file(name) as stream:
        return json.loads(stream.read(_MAX_JSON_BYTES))


def familiar(reference: str) -> str:
    """Return docker's short form: without default registry and `library/`, with `:latest` if no tag is given."""
    for prefix in ("docker.io/", "index.docker.io/"):
        reference = reference.removeprefix(prefix)
    reference = reference.removeprefix("library/")
    return reference if ":" in reference.rpartition("/")[2] or "@" in reference else f"{reference}:latest"
