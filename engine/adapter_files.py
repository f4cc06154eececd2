"""Files of a LoRA adapter: a PEFT directory, and beside it `base.json`, which names the model that it belongs to.

An adapter on another base is another policy, so `base.json` has the digests of the base's weight files, and an engine
loads the base again if its own differs. No torch and no vLLM at module level.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ratchet.lora_slots import FIRST_SLOT
from ratchet.types import JsonObject

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"
BASE_NAME = "base"
"""vLLM's name of the model without adapter, in an engine with LoRA; its adapters have the names of the slots."""


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model that an adapter was trained on: its directory, and [{"name", "sha256"}] of its weight files."""

    directory: Path
    files: list[JsonObject]


def is_adapter(names: Iterable[str]) -> bool:
    """Return whether these files, with or without a directory, are those of an adapter."""
    return any(name.rpartition("/")[2] == WEIGHTS for name in names)


def write_base(base: Path, files: Sequence[JsonObject], published: Path, directory: Path) -> None:
    """Write `base.json` to `directory`; `published` is where it will lie, to which the base's path is relative.

    A relative path is right on every machine that mounts the root of all policies.
    """
    digests = [{"name": file["name"], "sha256": file["sha256"]} for file in files]
    relative = os.path.relpath(base.resolve(), published.resolve())
    (directory / BASE).write_text(json.dumps({"directory": relative, "files": digests}, indent=2))


def read_base(directory: Path) -> AdapterBase:
    """Return the base of the adapter in `directory`. Raises OSError or ValueError if it cannot be read."""
    try:
        values = json.loads((directory / BASE).read_text())
        return AdapterBase((directory / values["directory"]).resolve(), list(values["files"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / BASE} is in an unknown form: {error!r}") from None


def slot_directory(adapter: Path, slot: int) -> Path:
    """Return the directory from which vLLM reads the adapter of a slot. `adapter`: that of the first slot."""
    return adapter if slot == FIRST_SLOT else adapter.with_name(f"{adapter.name}-{slot}")


def write_identity_adapter(directory: Path, rank: int) -> None:
    """Write an adapter that changes nothing: zeros for a layer of no model, since vLLM 0.32 needs one."""
    import numpy as np
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
    layer = "base_model.model.identity.base_layer"  # "base_layer": vLLM does not look for it in the model
    zeros = {
        f"{layer}.lora_A.weight": np.zeros((rank, 1), np.float32),
        f"{layer}.lora_B.weight": np.zeros((1, rank), np.float32),
    }
    _replace(directory / CONFIG, lambda new: new.write_text(json.dumps(config)))
    _replace(directory / WEIGHTS, partial(save_file, zeros))


def place_adapter(paths: Sequence[Path], directory: Path) -> None:
    """Copy an adapter's config and weights to the directory that vLLM reads.

    Several processes of one engine may do this at once: each file is replaced as a whole, with the same contents.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if path.name in (CONFIG, WEIGHTS):
            _replace(directory / path.name, partial(shutil.copyfile, path))


def adapter_rank(directory: Path) -> int:
    return int(json.loads((directory / CONFIG).read_text())["r"])


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Replace the file as a whole by what `write` writes to the path that it gets."""
    building = path.with_name(f".{path.name}.{os.getpid()}")
    write(building)
    building.replace(path)
