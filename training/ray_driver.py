"""The learner under Ray Train: one driver per run starts the ranks and restarts them when one dies.

This is the only file of `training/` that depends on Ray; `training/torchrun.py` starts the same ranks without it.
"""

import contextlib
import os
import socket
import time
from dataclasses import fields
from typing import Any

import torch

from ratchet.logs import configure_logs
from training.rank_runtime import RankSettings
from training.train_loop import train_rank

_UNUSED_CALLBACKS = ("PlacementGroupCleanerCallback", "DatasetsCallback")
"""Callbacks of Ray Train that are left out.

The cleaner is a detached actor. It outlives a killed driver, for ever if the cluster has no dashboard to ask; our ranks
and their placement group belong to the driver's job and end with it. Plan rows need no actors of Ray Data.
"""

_HEAD_SECONDS = 600.0
_SHARE_OF_ONE_NODE = 0.125
"""CPUs that a rank asks Ray for on a cluster of one node: the four of `ratchet up` have place for 32 ranks."""


def _train_rank(values: dict[str, Any]) -> None:
    configure_logs("learner")
    train_rank(RankSettings(**values))


def _wait_for_head(address: str) -> None:
    """Wait until the head listens: the stack's own starts when a run wants a learner."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _HEAD_SECONDS
    while host and "/" not in host and port.isdigit() and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            return
        time.sleep(0.5)


def run_driver(settings: RankSettings, num_workers: int) -> None:
    """Run the ranks under Ray Train until the run has ended; a dead rank restarts all of them from the checkpoint."""
    import ray
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    class Trainer(TorchTrainer):  # type: ignore[misc]  # Ray is untyped
        def _create_default_callbacks(self) -> list[Any]:
            return [
                callback
                for callback in super()._create_default_callbacks()
                if type(callback).__name__ not in _UNUSED_CALLBACKS
            ]

    if not ray.is_initialized():
        _wait_for_head(os.environ.get("RAY_ADDRESS", ""))
        ray.init(
            address=os.environ.get("RAY_ADDRESS", "auto"),
            namespace=settings.run_id,
            log_to_driver=True,
            logging_level="ERROR",
        )
    use_gpu = torch.cuda.is_available()
    # The only node is this machine's, whose number of CPUs is nominal: the learners of several runs must fit on it. Of
    # several nodes, each keeps as many ranks as it has CPUs.
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    per_rank = {"CPU": 1.0 if num_nodes > 1 else _SHARE_OF_ONE_NODE}
    trainer = Trainer(
        _train_rank,
        train_loop_config={field.name: getattr(settings, field.name) for field in fields(settings)},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=per_rank),
        run_config=train.RunConfig(
            name=settings.run_id,
            storage_path=str(settings.checkpoints / "ray"),
            failure_config=train.FailureConfig(max_failures=-1),
        ),
    )
    trainer.fit()
