"""Write checkpoints beside the training and commit them: files first, then the run's checkpoint pointer."""

import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.errors import FencedError
from store import learner_commits
from training import checkpoint
from training.learner import RankLearner
from training.rank_runtime import RankContext


@dataclass(slots=True, frozen=True)
class _PendingCheckpoint:
    """A checkpoint that is being written. Rank 0's future is done when all ranks' files and the metadata are written.

    `started`: monotonic clock, in seconds. `blocked_seconds`: time in which the state was copied and no step could run.
    """

    step: int
    uri: str
    future: "Future[Any]"
    started: float
    blocked_seconds: float


class CheckpointWriter:
    """At most one checkpoint is in flight. Until it is committed, a restart replays from the checkpoint before it."""

    def __init__(self, context: RankContext, learner: RankLearner) -> None:
        self.context = context
        self.learner = learner
        self._pending: _PendingCheckpoint | None = None

    def start(self, step: int) -> None:
        """Copy the state and start to write it; training continues meanwhile. A collective of all ranks."""
        self.commit()
        lease = self.context.lease
        self.context.heartbeat.set_phase("checkpointing", step)
        uri = str(self.context.settings.checkpoints / lease.run_id / f"step{step}.e{lease.epoch}")
        started = time.monotonic()
        future = self.learner.save_async(uri)
        self._pending = _PendingCheckpoint(step, uri, future, started, time.monotonic() - started)

    def is_written(self) -> bool:
        """Return whether a checkpoint is written and waits for its commit."""
        return self._pending is not None and self._pending.future.done()

    def commit(self) -> None:
        """Wait for the checkpoint in flight, if any, and move the run's checkpoint pointer to it. A collective.

        Raises OSError if it cannot be written, and FencedError if another learner has taken over; the files are then
        deleted.
        """
        if self._pending is None:
            return
        pending = self._pending
        with checkpoint.as_os_error(OSError, "written"):
            pending.future.result()
        metrics = {
            "checkpoint_blocked_seconds": pending.blocked_seconds,
            "checkpoint_seconds": time.monotonic() - pending.started,
        }
        self._pending = None
        self.context.after_point("save", pending.step)
        kept = self._move_pointer(pending, metrics)
        self.context.after_point("commit", pending.step)
        self.context.sinks.write(pending.step, metrics)
        directory = Path(pending.uri).parent
        epoch = self.context.lease.epoch
        self.context.ranks.on_rank_zero(lambda: checkpoint.discard_all_but(directory, kept, epoch))
        if self.learner.config.training.router_replay:
            self.context.ranks.transaction(partial(learner_commits.drop_routed_experts, lease=self.context.lease))

    def _move_pointer(self, pending: _PendingCheckpoint, metrics: dict[str, float]) -> list[str]:
        """Return the URIs of the checkpoints to keep."""
        world_size = self.learner.world_size
        num_threads = self.context.settings.num_threads
        try:
            return self.context.ranks.transaction(
                learner_commits.commit_checkpoint,
                self.context.lease,
                pending.step,
                pending.uri,
                world_size,
                num_threads,
                metrics,
            )
        except FencedError:
            shutil.rmtree(pending.uri, ignore_errors=True)
            raise
