"""Files of a published policy version: a complete model directory or, with LoRA, a PEFT directory with the adapter.

They are digested and fsynced before the version's row exists. An engine, an evaluation and a user's own server load the
same directory. Module-level imports are the standard library, `ratchet.errors` and `ratchet.types`, since activity
workers and vLLM's processes import this file too.
"""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from engine import adapter_files
from ratchet.errors import ConfigError
from ratchet.types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

MAX_FILE_BYTES = 5 * 10**9
"""A larger model is written in several files, which are written, fsynced and digested side by side."""
UNTOUCHED = "untouched.safetensors"
"""File of a version with the tensors of its base that are not trained, such as those of a vision tower."""
_WHOLE = "model.safetensors"
_ABANDONED_SECONDS = 86_400.0
_INDEX = f"{_WHOLE}.index.json"
_WRITERS = 8
_PIECE_BYTES = 16 * 2**20
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file, read in pieces."""
    with path.open("rb", buffering=0) as file:
        return sha256_of(file)


def sha256_of(file: FileIO) -> str:
    """Return the hex digest of an open file. Its pieces are large: a thread waits for Python's lock between two."""
    digest = hashlib.sha256()
    piece = memoryview(bytearray(max(1, min(_PIECE_BYTES, os.fstat(file.fileno()).st_size))))
    while num_bytes := file.readinto(piece):
        digest.update(piece[:num_bytes])
    return digest.hexdigest()


def describe_files(directory: Path) -> list[JsonObject]:
    """Return [{"name", "sha256", "bytes"}] of the files that make up a model, sorted by name."""
    return [_describe(path) for path in _model_files(directory)]


def weight_files(files: Sequence[JsonObject]) -> list[JsonObject]:
    """Return those of `describe_files` that an engine reads: all with tensors; of an adapter also its two configs."""
    if adapter_files.is_adapter(file["name"] for file in files):
        return list(files)
    return [file for file in files if file["name"].endswith(".safetensors")]


def is_address(uri: str) -> bool:
    """Return whether a policy version's files are at an address of fsspec, and not on a path that all hosts share."""
    return "://" in uri


def policy_directory(uri: str, root: Path) -> Path:
    """Return the directory of a policy version on this machine.

    `root`: the directory of all policies. Files at an address have a copy below it: the learner's own, or one that
    `engine/policy_cache.py` fetches.
    """
    return root.joinpath(*uri.rstrip("/").split("/")[-2:]) if is_address(uri) else Path(uri)


def is_intact(directory: Path, files: Sequence[JsonObject]) -> bool:
    """Return whether all files are there with their recorded digests; of an adapter also those of its base."""
    expected = [(directory / file["name"], file["sha256"]) for file in files]
    if not expected or not all(path.is_file() and file_sha256(path) == digest for path, digest in expected):
        return False
    if not adapter_files.is_adapter(file["name"] for file in files):
        return True
    base = adapter_files.read_base(directory)
    return is_intact(base.directory, base.files)


def whole_model(directory: Path) -> Path:
    """Return the directory of the whole model of a version: its own or, of an adapter, that of its base."""
    return adapter_files.read_base(directory).directory if (directory / adapter_files.BASE).is_file() else directory


def link_version(model: Path, directory: Path) -> list[JsonObject]:
    """Make a version of a model by hard links or copies; return `describe_files`. Raises ConfigError for an adapter."""
    if (model / adapter_files.WEIGHTS).exists():
        raise ConfigError(
            f"init_from: {model} holds a LoRA adapter, no whole model; merge it into its base with peft "
            "(merge_and_unload), save the result, and name that directory"
        )
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(directory)
        # Of this call's own: rollouts that are started by hand at the same moment make the same version.
        building = Path(tempfile.mkdtemp(prefix=f"{directory.name}.building-", dir=directory.parent))
        try:
            building.chmod(0o755)
            _link_or_copy(model, building)
            building.rename(directory)
        except BaseException as error:
            # The next try makes a directory of its own: a full disk would get fuller with each.
            shutil.rmtree(building, ignore_errors=True)
            if not isinstance(error, OSError) or not directory.is_dir():  # else another call was faster
                raise
    return describe_files(directory)


def _delete_abandoned(directory: Path) -> None:
    """Delete what calls that were killed have left beside `directory`; no call takes so long."""
    for left in directory.parent.glob(f"{glob.escape(directory.name)}.building-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _link_or_copy(model: Path, directory: Path) -> None:
    for path in model.iterdir():
        if _is_model_file(path):
            try:
                os.link(path.resolve(), directory / path.name)
            except OSError:
                shutil.copyfile(path, directory / path.name)


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor of a model directory, as transformers finds them."""
    from safetensors import safe_open

    index = directory / _INDEX
    if index.is_file() and not (directory / _WHOLE).is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    with safe_open(directory / _WHOLE, "pt") as stored:
        return dict.fromkeys(stored.keys(), directory / _WHOLE)


class UntouchedTensors:
    """The tensors of a base that no step changes: its first version gets a file of them, each later one a hard link."""

    def __init__(self, base: Path, names: Sequence[str]) -> None:
        self.base = base
        self.names = names
        self._written: Path | None = None
        self._sha256 = ""

    def place(self, file: Path) -> None:
        """Make `file`: a link to that of the version before if it is unchanged, else a new one."""
        if self._written is not None:
            with contextlib.suppress(OSError):  # that version may have been deleted
                os.link(self._written, file)
                if file_sha256(file) == self._sha256:
                    return
        file.unlink(missing_ok=True)
        _save_tensors(dict(self._read()), file)

    def was_placed(self, directory: Path, files: Sequence[JsonObject]) -> None:
        """Remember the version `directory` with these files, whose file later ones link to."""
        self._written = directory / UNTOUCHED
        self._sha256 = next(file["sha256"] for file in files if file["name"] == UNTOUCHED)

    def _read(self) -> "Iterator[tuple[str, Tensor]]":
        from safetensors import safe_open

        files = tensor_files(self.base)
        for path in sorted({files[name] for name in self.names}):
            with safe_open(path, "pt") as stored:
                for name in self.names:
                    if files[name] == path:
                        yield name, stored.get_tensor(name)


def publish_policy(
    state: "Mapping[str, Tensor]", base: Path, directory: Path, untouched: UntouchedTensors | None = None
) -> list[JsonObject]:
    """Write `state`, and config, tokenizer, template and `untouched` tensors of `base`; return `describe_files`."""
    from huggingface_hub import split_torch_state_dict_into_shards

    others = untouched if untouched is not None and untouched.names else None
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    # transformers reads a file of the usual name alone, without its index
    names = "model{suffix}.safetensors" if others is None else "text{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(contiguous, filename_pattern=names, max_shard_size=MAX_FILE_BYTES)
    weight_map = split.tensor_to_filename | dict.fromkeys(others.names if others else (), UNTOUCHED)

    def fill(building: Path) -> None:
        for path in base.iterdir():
            if path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
                shutil.copyfile(path, building / path.name)
        if others is not None:
            others.place(building / UNTOUCHED)
        if split.is_sharded or others is not None:
            index = {"metadata": split.metadata, "weight_map": weight_map}
            (building / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))

        def write(file: str) -> None:
            _save_tensors({name: contiguous[name] for name in split.filename_to_tensors[file]}, building / file)

        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(write, split.filename_to_tensors))

    files = _publish(directory, fill)
    if others is not None:
        others.was_placed(directory, files)
    return files


def publish_adapter(
    state: "Mapping[str, Tensor]", config: JsonObject, base: Path, base_files: Sequence[JsonObject], directory: Path
) -> list[JsonObject]:
    """Write a PEFT directory and the description of its base to `directory`; return `describe_files`.

    `state`: tensors under PEFT's names. `config`: PEFT's. `base_files`: the base's weight files with their digests.
    """

    def fill(building: Path) -> None:
        (building / adapter_files.CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True))
        adapter_files.write_base(base, base_files, directory, building)
        _save_tensors({name: tensor.contiguous() for name, tensor in state.items()}, building / adapter_files.WEIGHTS)

    return _publish(directory, fill)


def _publish(directory: Path, fill: Callable[[Path], None]) -> list[JsonObject]:
    """Let `fill` write the files of `directory`; return `describe_files`.

    The directory appears by a rename, after its files are fsynced. An existing directory was written by the same (step,
    epoch), with the same contents or in part, and is replaced.
    """
    building = directory.with_name(directory.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    fill(building)
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(fsync, building.iterdir()))
        fsync(building)
        files = list(pool.map(_describe, _model_files(building)))
    shutil.rmtree(directory, ignore_errors=True)
    building.rename(directory)
    fsync(directory.parent)
    return files


def _save_tensors(tensors: "Mapping[str, Tensor]", path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata={"format": "pt"})


def _describe(path: Path) -> JsonObject:
    return {"name": path.name, "sha256": file_sha256(path), "bytes": path.stat().st_size}


def _model_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if _is_model_file(path))


def _is_model_file(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.suffix in _COPIED_SUFFIXES


def fsync(path: Path) -> None:
    """Write a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
