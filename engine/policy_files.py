"""Files of a published policy version: a complete model directory, digested and fsynced before its row exists.

An engine, an evaluation and a user's own server load the same directory. Module-level imports are the standard
library and `ratchet.types`, since activity workers and vLLM's processes import this file too.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(directory: Path) -> list[JsonObject]:
    """Return [{"name", "sha256", "bytes"}] of the files that make up a model, sorted by name."""
    paths = sorted(path for path in directory.iterdir() if _is_model_file(path))
    return [{"name": path.name, "sha256": file_sha256(path), "bytes": path.stat().st_size} for path in paths]


def weight_files(files: Sequence[JsonObject]) -> list[JsonObject]:
    """Return those of `describe_files` that hold tensors."""
    return [file for file in files if file["name"].endswith(".safetensors")]


def policy_directory(uri: str) -> Path:
    """Return the directory of a policy version's URI."""
    return Path(uri.removeprefix("file://"))


def is_intact(directory: Path, files: Sequence[JsonObject]) -> bool:
    """Return whether all files are there with their recorded digests."""
    expected = [(directory / file["name"], file["sha256"]) for file in files]
    return bool(expected) and all(path.is_file() and file_sha256(path) == digest for path, digest in expected)


def link_version(model: Path, directory: Path) -> list[JsonObject]:
    """Make a policy version of a model directory, by hard links if possible, else copies; return `describe_files`."""
    if not directory.exists():
        building = _empty_building_directory(directory)
        for path in model.iterdir():
            if _is_model_file(path):
                try:
                    os.link(path.resolve(), building / path.name)
                except OSError:
                    shutil.copyfile(path, building / path.name)
        building.rename(directory)
    return describe_files(directory)


def publish_policy(state: "Mapping[str, Tensor]", base: Path, directory: Path) -> list[JsonObject]:
    """Write `state`, and the config, tokenizer and template of `base`, to `directory`; return `describe_files`.

    The directory appears by a rename, after its files are fsynced. An existing directory was written by the same (step,
    epoch), with the same contents or in part, and is replaced.
    """
    from safetensors.torch import save_file

    building = _empty_building_directory(directory)
    for path in base.iterdir():
        if path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, building / path.name)
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, building / WEIGHTS, metadata={"format": "pt"}
    )
    for path in building.iterdir():
        _fsync(path)
    _fsync(building)
    shutil.rmtree(directory, ignore_errors=True)
    building.rename(directory)
    _fsync(directory.parent)
    return describe_files(directory)


def _is_model_file(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.suffix in _COPIED_SUFFIXES


def _empty_building_directory(directory: Path) -> Path:
    building = directory.with_name(directory.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    return building


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
