"""Save and load checkpoints with torch's distributed checkpointing (DCP).

With LoRA it holds the adapters and their optimiser state alone, and a line that says which adapters, on which base.
A checkpoint is either complete or no checkpoint at all. Which one counts is recorded in the store
(`store/learner_commits.py`), in the same transaction as the consumption of its batches.
"""

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from engine.policy_files import file_sha256
from training.rank_zero import read_on_rank_zero


class DamagedCheckpointError(OSError):
    """A checkpoint's files are missing, incomplete, changed, or cannot be read."""


_DIGESTS = "sha256.json"
"""End of the name of a file with the digests of one rank's files, as {name: sha256}."""

_ADAPTER = "adapter"
"""Key of the description of the adapters (`training/lora.py`), which only checkpoints of LoRA have."""

_EPOCH = re.compile(r"\.e(\d+)(?!.*\.(?:fetching|deleting|lock)$)")
"""Matches the epoch in a version's name, but no files that a node keeps beside its copies (`engine/policy_cache.py`).
"""


def _options(adapter: str | None) -> StateDictOptions:
    return StateDictOptions() if adapter is None else StateDictOptions(ignore_frozen_params=True, strict=False)


_KERNEL_FLAGS = ("fused", "foreach", "capturable")
"""Flags that select the kernels of the optimiser's step. They belong to the machine that runs the step, not to the one
that wrote the checkpoint."""


def _state_dict(
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    adapter: str | None,
) -> dict[str, Any]:
    """Return everything that is saved. Random state is not: the learner derives it from (seed, step, rank)."""
    weights, moments = get_state_dict(model, optimiser, options=_options(adapter))
    state = {"model": weights, "optimiser": moments, "schedule": schedule.state_dict()}
    return state if adapter is None else state | {_ADAPTER: adapter}


def save_async(
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    uri: str,
    group: dist.ProcessGroup,
    adapter: str | None = None,
) -> "Future[Any]":
    """Copy the state, then write it beside the training. A collective of all ranks; one checkpoint at a time.

    `adapter`: the description of the adapters, with which only they are saved; None saves all weights.

    `group` (gloo) must have no other user: two threads in one gloo group abort the process. DCP writes `.metadata`
    last; a directory without it is no checkpoint.
    """
    state = _state_dict(model, optimiser, schedule, adapter)
    future = state_dict_saver.async_save(state, checkpoint_id=uri, process_group=group)
    assert isinstance(future, Future)
    digesting = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digests")
    written = digesting.submit(_digest_own_files, future, Path(uri), dist.get_rank())
    digesting.shutdown(wait=False)
    return written


def _digest_own_files(written: "Future[Any]", directory: Path, rank: int) -> None:
    """Write the digests of this rank's files beside them, once they are complete.

    DCP reads a file whose numbers have changed without a word, and wrong weights would be trained on and served.
    """
    written.result()
    own = sorted(directory.glob(f"__{rank}_*")) + ([directory / ".metadata"] if rank == 0 else [])
    digests = {path.name: file_sha256(path) for path in own}
    building = directory / f".{rank}.{_DIGESTS}"
    with building.open("w") as file:
        json.dump(digests, file)
        file.flush()
        os.fsync(file.fileno())
    building.rename(directory / f"{rank}.{_DIGESTS}")


def _damage(directory: Path, rank: int, num_ranks: int) -> str:
    """Return which of the files that fall to this rank is damaged, empty if none is."""
    try:
        lists = sorted(directory.glob(f"[0-9]*.{_DIGESTS}"))
        digests = [item for one in lists for item in sorted(json.loads(one.read_text()).items())]
        for name, digest in digests[rank::num_ranks]:
            if file_sha256(directory / name) != digest:
                return f"{name} has changed since it was written"
    except (OSError, ValueError, AttributeError) as error:
        return f"{error!r:.200}"
    return ""


def _require_intact(uri: str) -> None:
    """Raise DamagedCheckpointError on every rank if a file is damaged. A collective; each rank reads its share."""
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, _damage(Path(uri), dist.get_rank(), dist.get_world_size()))
    if found := next(filter(None, reasons), ""):
        raise DamagedCheckpointError(f"{uri} is damaged: {found}")


@contextlib.contextmanager
def as_os_error(kind: type[OSError], action: str) -> Iterator[None]:
    """Turn a CheckpointException, which is no Exception and carries the stack traces of all ranks, into this error."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise kind(f"the checkpoint could not be {action} (rank {rank}): {cause}") from error


def load_checkpoint(
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    uri: str,
    adapter: str | None = None,
) -> None:
    """Load a checkpoint into the model, optimiser and schedule; reshard it if the number of ranks has changed.

    A collective of all ranks, and every rank raises the same kind of error. Raises ValueError if it is no checkpoint of
    this model (another architecture, vocabulary or optimiser state, other adapters or another base of them),
    DamagedCheckpointError if its files cannot be read, OSError if only some ranks find its metadata: their directory is
    another one, which says nothing about the checkpoint.
    """
    state = _state_dict(model, optimiser, schedule, adapter)
    metadata = _read_metadata(uri)
    _require_same_adapter(adapter, metadata, uri)
    _require_same_tensors(state, metadata, uri)
    if adapter is None:  # else checked before the adapter's description was read
        _require_intact(uri)
    groups = state["optimiser"]["param_groups"]
    own = [{key: group[key] for key in _KERNEL_FLAGS} for group in groups]
    with as_os_error(DamagedCheckpointError, "read"):
        state_dict_loader.load(state, checkpoint_id=uri)
    for group, flags in zip(state["optimiser"]["param_groups"], own, strict=True):
        group.update(flags)
    set_state_dict(
        model,
        optimiser,
        model_state_dict=state["model"],
        optim_state_dict=state["optimiser"],
        options=_options(adapter),
    )
    schedule.load_state_dict(state["schedule"])


def _read_metadata(uri: str) -> Metadata:
    """Return the checkpoint's metadata. A collective: the ranks agree whether it can be read."""
    found: Metadata | None = None
    reason = ""
    try:
        found = FileSystemReader(uri).read_metadata()
    except Exception as error:  # it is a pickle, so that damage can raise anything
        reason = f"{error!r:.200}"
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    failed = [f"rank {rank}: {one}" for rank, one in enumerate(reasons) if one]
    if found is None and len(failed) == len(reasons):
        raise DamagedCheckpointError(f"{uri} is no complete checkpoint: {reason}")
    if failed or found is None:
        raise OSError(f"{uri} cannot be read by {len(failed)} of {len(reasons)} ranks: {failed[0]}")
    return found


def _require_same_adapter(adapter: str | None, metadata: Metadata, uri: str) -> None:
    """Raise ValueError, naming what differs, if the checkpoint was written with another `training.lora` or base."""
    if (adapter is not None) != (_ADAPTER in metadata.state_dict_metadata):
        wrote, wants = ("LoRA", "all weights") if adapter is None else ("all weights", "LoRA")
        raise ValueError(f"training.lora: {uri} was written by a run that trains {wrote}, and this one trains {wants}")
    if adapter is None:
        return
    _require_intact(uri)
    stored = json.loads(read_on_rank_zero(lambda: read_adapter(uri)) or "{}")
    for name, value in json.loads(adapter).items():
        if stored.get(name) != value:
            raise ValueError(
                f"training.lora: {uri} was written with {name} {stored.get(name)}, and this run has {value}; "
                "resume it with the settings that it began with, or start another run"
            )


def read_adapter(uri: str) -> str | None:
    """Return the description of a checkpoint's adapters, None if it has none. Needs no process group.

    Raises OSError if it cannot be read.
    """
    if _ADAPTER not in FileSystemReader(uri).read_metadata().state_dict_metadata:
        return None
    state = {_ADAPTER: ""}
    # DCP warns that there is no process group.
    with warnings.catch_warnings(action="ignore", category=UserWarning), as_os_error(OSError, "read"):
        state_dict_loader.load(state, checkpoint_id=uri, no_dist=True)
    return state[_ADAPTER]


def _require_same_tensors(state: Mapping[str, Any], metadata: Metadata, uri: str) -> None:
    """Compare names and shapes before any tensor is read, so that a model is never loaded in part."""
    stored = metadata.state_dict_metadata
    expected = {
        name: value.shape
        for name, value in flatten_state_dict(dict(state))[0].items()
        if isinstance(value, torch.Tensor)
    }
    found = {name: value.size for name, value in stored.items() if isinstance(value, TensorStorageMetadata)}
    if unmatched := sorted(expected.keys() ^ found.keys()):
        side = "the checkpoint" if unmatched[0] in found else "the model"
        raise ValueError(
            f"{uri} is a checkpoint of another model: only {side} has {unmatched[0]} ({len(unmatched)} such)"
        )
    for name, shape in expected.items():
        if shape != found[name]:
            raise ValueError(
                f"{uri} is a checkpoint of another model: {name} has shape {tuple(found[name])}, "
                f"expected {tuple(shape)}"
            )


def load_weights(model: torch.nn.Module, uri: str) -> dict[str, torch.Tensor]:
    """Return the checkpoint's weights by name. Needs no process group; any number of ranks may have written it.

    Raises DamagedCheckpointError if a file has changed.
    """
    if damage := _damage(Path(uri), 0, 1):
        raise DamagedCheckpointError(f"{uri} is damaged: {damage}")
    adapter = read_adapter(uri)
    state = {"model": get_model_state_dict(model, options=_options(adapter))}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # DCP warns that there is no process group
        state_dict_loader.load(state, checkpoint_id=uri, no_dist=True)
    return {name: tensor for name, tensor in state["model"].items() if isinstance(tensor, torch.Tensor)}


def discard_all_but(directory: Path, kept: Collection[str], epoch: int) -> None:
    """Delete every checkpoint or policy version in `directory` but `kept`, up to the epoch of this learner.

    That includes those whose learner died before their rows were written. Those of a later epoch stay: a learner that
    was replaced while it was stopped has an outdated `kept`.
    """
    if not directory.is_dir():
        return
    for name in discarded((path.name for path in directory.iterdir()), kept, epoch):
        shutil.rmtree(directory / name, ignore_errors=True)


def newest_epoch(*directories: Path) -> int:
    """Return the highest epoch of the checkpoints and versions in these directories, 0 without any. A store that was
    restored to an older state does not know it."""
    names = [path.name for directory in directories for path in directory.glob("*")]
    return max((int(match[1]) for match in map(_EPOCH.search, names) if match), default=0)


def discarded(found: Iterable[str], kept: Collection[str], epoch: int) -> list[str]:
    """Return those names of directories that `discard_all_but` deletes. `kept`: paths or addresses."""
    names = {Path(uri).name for uri in kept}  # not paths: another machine may mount the same directory elsewhere
    written = ((name, _EPOCH.search(name)) for name in found if name not in names)
    return [name for name, match in written if match is not None and int(match[1]) <= epoch]
