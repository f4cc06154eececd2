"""Checkpoints by torch's DCP: files, complete or no checkpoint at all.

Why here: which of them counts is said in the store (`training/learner_commits.py`), in the same transaction as what they have consumed.
Called by: `training/learner.py` (save, load), `training/ray_driver.py` (wait, discard), `training/policy_export.py`.
"""

import contextlib
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

_EPOCH = re.compile(r"\.e(\d+)")


def _state(
    model: torch.nn.Module, optimiser: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> dict[str, Any]:
    """No random state: the learner derives it from (seed, step, rank)."""
    weights, moments = get_state_dict(model, optimiser)
    return {"model": weights, "optimiser": moments, "schedule": schedule.state_dict()}


def save_later(
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    uri: str,
    group: dist.ProcessGroup,
) -> "Future[Any]":
    """A collective of all ranks: copies the state, then writes it beside the training. One at a time; `group` (gloo) is for it alone,
    since two threads in one gloo group abort the process. `.metadata` is written last: without it the directory is no checkpoint.
    """
    future = state_dict_saver.async_save(_state(model, optimiser, schedule), checkpoint_id=uri, process_group=group)
    assert isinstance(future, Future)
    return future


def wait_for_save(future: "Future[Any]") -> None:
    """Until the checkpoint is written. Raises OSError where it cannot be."""
    with _said("written"):
        future.result()


@contextlib.contextmanager
def _said(done: str) -> Iterator[None]:
    """What DCP raises is no Exception, and carries the stack traces of all ranks."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"the checkpoint could not be {done} (rank {rank}): {cause}") from error


def load_checkpoint(
    model: torch.nn.Module, optimiser: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, uri: str
) -> None:
    """A collective of all ranks; reshards where the number of ranks has changed. Raises ValueError for what is no checkpoint of this
    model: another architecture, vocabulary, or an optimiser state of other shapes; OSError where its files cannot be read.
    """
    state = _state(model, optimiser, schedule)
    _check(state, uri)
    with _said("read"):
        state_dict_loader.load(state, checkpoint_id=uri)
    set_state_dict(model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
    schedule.load_state_dict(state["schedule"])


def _check(state: Mapping[str, Any], uri: str) -> None:
    """Before the first tensor is read: a half-loaded model is worse than none."""
    try:
        stored = FileSystemReader(uri).read_metadata().state_dict_metadata
    except OSError as error:
        raise ValueError(f"{uri} is no complete checkpoint: {error}") from None
    expected = {
        name: value.shape
        for name, value in flatten_state_dict(dict(state))[0].items()
        if isinstance(value, torch.Tensor)
    }
    found = {name: value.size for name, value in stored.items() if isinstance(value, TensorStorageMetadata)}
    if strange := sorted(expected.keys() ^ found.keys()):
        where = "the checkpoint" if strange[0] in found else "the model"
        raise ValueError(f"{uri} is a checkpoint of another model: only {where} has {strange[0]} ({len(strange)} such)")
    for name, shape in expected.items():
        if shape != found[name]:
            raise ValueError(
                f"{uri} is a checkpoint of another model: {name} has shape {tuple(found[name])}, expected {tuple(shape)}"
            )


def load_weights(model: torch.nn.Module, uri: str) -> dict[str, torch.Tensor]:
    """The checkpoint's weights by name, read by one process without a process group, whatever number of ranks wrote them."""
    state = {"model": get_model_state_dict(model)}
    with warnings.catch_warnings(
        action="ignore", category=UserWarning
    ):  # DCP remarks that there is no process group: so it is meant
        state_dict_loader.load(state, checkpoint_id=uri, no_dist=True)
    return {name: tensor for name, tensor in state["model"].items() if isinstance(tensor, torch.Tensor)}


def discard_checkpoint(directory: Path, kept: Collection[str], epoch: int) -> None:
    """Ends every checkpoint or policy in `directory` but `kept`: older ones, and those whose learner died before their rows were written.

    Never those of a later epoch: a learner that was replaced while it stood still does not know which of them are kept.
    """
    names = {Path(uri).name for uri in kept}  # not their paths: another machine may see the same directory elsewhere
    for path in directory.iterdir() if directory.is_dir() else ():
        written = _EPOCH.search(path.name)
        if path.name not in names and written is not None and int(written[1]) <= epoch:
            shutil.rmtree(path, ignore_errors=True)
