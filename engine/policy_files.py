"""Published policy versions: a complete model directory, digested and fsynced before its row exists.

Why here: an engine, an evaluation and a user's own server load the same directory.
Called by: `activities/run_lifecycle.py` (version 0), `training/learner.py` (every step), and who brings weights to engines. Torch is imported late for workers.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
_COPIED = (".json", ".jinja", ".txt", ".model")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(directory: Path) -> list[dict[str, Any]]:
    """[{"name", "sha256", "bytes"}] of the files that make up a model, sorted by name."""
    names = sorted(path for path in directory.iterdir() if path.suffix == ".safetensors" or path.suffix in _COPIED)
    return [{"name": path.name, "sha256": _sha256(path), "bytes": path.stat().st_size} for path in names]


def weight_files(files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of `describe_files`, those with tensors."""
    return [file for file in files if file["name"].endswith(".safetensors")]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_version(model: Path, directory: Path) -> list[dict[str, Any]]:
    """A model directory as a policy version: hard links where the file system allows, else copies; returns `describe_files`."""
    if not directory.exists():
        building = directory.with_name(directory.name + ".building")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        for path in model.iterdir():
            if path.suffix == ".safetensors" or path.suffix in _COPIED:
                try:
                    os.link(path.resolve(), building / path.name)
                except OSError:
                    shutil.copyfile(path, building / path.name)
        building.rename(directory)
    return describe_files(directory)


def publish_policy(state: "Mapping[str, Tensor]", base: Path, directory: Path) -> list[dict[str, Any]]:
    """Writes `state` and everything else of `base` (config, tokenizer, template) to `directory` by rename; returns `describe_files`.

    A directory that is there already was written by this very (step, epoch) and is replaced: same contents, or a torn try.
    """
    from safetensors.torch import save_file

    building = directory.with_name(directory.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    for path in base.iterdir():
        if path.suffix in _COPIED and not path.name.endswith(".index.json"):
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
