"""Images as users provide them: a tree of the host's programs, and archives of it in the formats of OCI and docker."""

import gzip
import hashlib
import io
import json
import platform
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zstandard

PROGRAMS = ("bash", "cat", "id", "touch", "mkdir", "ls", "stat", "sleep", "grep", "chown")
CONFIG = {
    "Env": ["FROM_IMAGE=yes and = more", "PATH=/opt/tool:/usr/bin:/bin"],
    "WorkingDir": "/srv/work",
    "User": "1234:staff",
}
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def make_tree(root: Path, programs: Iterable[str] = PROGRAMS) -> Path:
    """Make a root file system with some of the host's programs and the libraries they load."""
    for name in ("bin", "etc/profile.d", "tmp", "root", "srv", "opt/tool"):
        (root / name).mkdir(parents=True)
    for name in programs:
        program = shutil.which(name)
        assert program is not None
        shutil.copy(program, root / "bin" / name)
        for word in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split():
            if word.startswith("/") and not (root / word[1:]).exists():
                (root / word[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, root / word[1:])
    (root / "etc" / "passwd").write_text(
        "root:x:0:0:root:/root:/bin/bash\nnode:x:1000:1000::/srv:/bin/bash\nworker:x:1234:1234::/srv:/bin/bash\n"
    )
    (root / "etc" / "group").write_text("root:x:0:\nstaff:x:50:\n")
    # Like Debian's: it resets PATH, then reads the directory.
    (root / "etc" / "profile").write_text('PATH=/bin\nfor f in /etc/profile.d/*.sh; do [ -r "$f" ] && . "$f"; done\n')
    (root / "srv" / "from-image").write_text("image\n")
    (root / "opt" / "tool" / "our-tool").write_text("#!/bin/bash\necho tool\n")
    (root / "opt" / "tool" / "our-tool").chmod(0o755)
    return root


Entry = tuple[str, bytes | str | None, dict[str, Any]]
"""Name; content, None for a directory; attributes of the TarInfo."""


def make_layer(entries: list[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content, attributes in entries:
            member = tarfile.TarInfo(name)
            data = content.encode() if isinstance(content, str) else content or b""
            member.size = len(data)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.mode = 0o755 if content is None else 0o644
            for key, value in attributes.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(data) if member.isreg() else None)
    return buffer.getvalue()


def tree_layer(tree: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(tree, ".")
    return buffer.getvalue()


def make_config(layers: list[bytes]) -> bytes:
    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    return json.dumps(
        {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": CONFIG,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
    ).encode()


def write_docker_archive(path: Path, layers: list[bytes], tags: list[str], config: bytes | None = None) -> Path:
    files = {"config.json": config or make_config(layers)}
    files |= {f"{number}/layer.tar": layer for number, layer in enumerate(layers)}
    manifest = [
        {"Config": "config.json", "RepoTags": tags, "Layers": [f"{number}/layer.tar" for number in range(len(layers))]}
    ]
    files["manifest.json"] = json.dumps(manifest).encode()
    path.write_bytes(make_layer([(name, content, {}) for name, content in files.items()]))
    return path


def oci_files(layers: list[bytes], name: str | None) -> dict[str, bytes]:
    """Return an index of two platforms; layers are compressed by gzip and zstd in turn."""
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(content: bytes, **facts: Any) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}", "size": len(content), **facts}

    packed = [
        gzip.compress(layer, 1) if number % 2 == 0 else zstandard.ZstdCompressor().compress(layer)
        for number, layer in enumerate(layers)
    ]
    manifest = {"schemaVersion": 2, "config": blob(make_config(layers)), "layers": [blob(layer) for layer in packed]}
    ours = blob(json.dumps(manifest).encode(), platform={"os": "linux", "architecture": ARCHITECTURE})
    other = {"digest": "sha256:" + "0" * 64, "size": 1, "platform": {"os": "linux", "architecture": "s390x"}}
    index = blob(json.dumps({"schemaVersion": 2, "manifests": [other, ours]}).encode())
    if name is not None:
        index["annotations"] = {"org.opencontainers.image.ref.name": name}
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [index]}).encode()
    return files


def write_oci_archive(path: Path, layers: list[bytes], name: str | None) -> Path:
    path.write_bytes(make_layer([(file, content, {}) for file, content in oci_files(layers, name).items()]))
    return path


def write_oci_layout(path: Path, layers: list[bytes], name: str | None) -> Path:
    for file, content in oci_files(layers, name).items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(content)
    return path


def write_unsquashfs(directory: Path) -> None:
    """Write a stand-in for the program that unpacks what `write_sif` has written, and says that it lacks rights."""
    directory.mkdir(exist_ok=True)
    unpack = 'mkdir "$5" && tail -c +$(($3 + 1)) "$6" | tar -xp -C "$5"; exit 2'
    (directory / "unsquashfs").write_text(
        f"#!/bin/sh\n# called with -no-xattrs -o OFFSET -d DIRECTORY FILE\n{unpack}\n"
    )
    (directory / "unsquashfs").chmod(0o755)


def write_sif(path: Path, layer: bytes, config: dict[str, Any] | None = None, file_system: int = 1) -> Path:
    """Write a SIF file whose system is a tar in the place of a squashfs, behind an overlay partition and a label.

    `file_system`: the number of its kind, 1 for squashfs.
    """
    objects = [(0x4004, "overlay", (1, 4), b"other"), (0x4004, "system", (file_system, 2), layer)]
    objects += [(0x4006, "inspect-metadata.json", (0, 0), b"[]")]
    objects += [(0x4006, "oci-config.json", (0, 0), json.dumps(config).encode())] if config is not None else []
    descriptors, data, start = b"", b"", 32_768
    for number, (kind, name, facts, content) in enumerate(objects, 1):
        at = (start + len(data), len(content), len(content), 0, 0, 0, 0)
        descriptors += struct.pack("<i?3I7q128s2i376x", kind, True, number, 0, 0, *at, name.encode(), *facts)
        data += content.ljust(-len(content) % 4096 + len(content), b"\0")
    head = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\00001\00002\0"
    numbers = struct.pack("<8q", 0, 0, 44, 48, 4096, len(descriptors), start, len(data))
    path.write_bytes(
        (head.ljust(64, b"\0") + numbers).ljust(4096, b"\0") + descriptors.ljust(start - 4096, b"\0") + data
    )
    return path
