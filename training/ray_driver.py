"""The learner as Ray Train runs it: one driver per run, long-lived ranks that execute plan rows from Postgres.

Why here: the only file of `training/` that knows Ray. The store is known to `batch.py`, `readiness.py`, `fenced.py`, `sync.py`, `push.py`
and `ranks.py` as well, and to nothing else.
Called by: `training/service.py` (`run_driver`); the tests run `train_rank` without Ray.

    take the lease (epoch + 1) ─▶ load the checkpoint ─▶ ┌ wait for plan row n ─▶ step ─▶ publish ─▶ every k steps: save, commit ┐
                                                         └───────────────────────────────────────────────────────────────────────┘

A kill on any line replays the steps above the checkpoint with the same contents; a zombie's writes match no row. Rank 0 alone asks and
writes the store, and tells the others what came of it: ranks never disagree about what comes next.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.errors import FencedError, StoreUnavailableError
from ratchet.store import checkpoints, learners, runs
from training import checkpoint, group_selection, learner_commits, planner
from training.learner import RankLearner
from training.learner_commits import RunLease
from training.metrics import alarms, group_metrics, sequence_metrics, speed_metrics
from training.plan_types import Plan, TrainingSequence
from training.rank_runtime import BlockingStore, HeartbeatThread, Ranks, RankSettings, lost_peer
from training.weight_broadcast import NcclBroadcastGroup, WeightBroadcast

_LOG = structlog.get_logger()

_POLL_SECONDS = 0.2


def train_rank(settings: RankSettings, after: Callable[[str, int], None] = lambda point, step: None) -> None:
    """One rank's whole life: until the run has ended or another learner has taken over. Needs an initialised process group.

    `after(point, step)` is called after `plan`, `step`, `write` (of the files), `publish` (of their row), `save` and `commit`; the fault
    tests die there.
    """
    torch.set_num_threads(settings.num_threads)
    store = BlockingStore(settings.database_url)
    try:
        ranks = Ranks(store)
        lease = ranks.write(lambda connection: learner_commits.take_lease(connection, settings.run_id))
        heart = HeartbeatThread(settings, lease, dist.get_world_size())
        with heart.beating(dist.get_rank() == 0):
            try:
                _Loop(settings, ranks, lease, heart, after).run()
            except ValueError as error:
                # A config, model or batch that cannot be trained on, seen by every rank alike: starting again would not help.
                reason = f"the learner cannot go on: {error}"
                ranks.write(lambda connection: learner_commits.pause_run(connection, lease, reason))
                _LOG.error("learner stops", run=settings.run_id, reason=reason)
            except (FencedError, StoreUnavailableError):
                raise
            except Exception as error:
                # The code's own, perhaps of this rank alone: the others wait in a collective, so it acts by itself and ends all by its end.
                if not lost_peer(error):
                    reason = f"the learner failed {learner_commits.MAX_FAILURES} times: {_words(error)}"
                    store.do(lambda connection: learner_commits.fail_run(connection, lease, heart.world_size, reason))
                raise
    except FencedError as error:
        _LOG.info("learner stops", run=settings.run_id, reason=str(error))
    finally:
        store.close()


def _words(error: Exception) -> str:
    """For a person: torch appends whole stack traces."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


class _Loop:
    """Steps from the checkpoint to the last one of the run."""

    def __init__(
        self,
        settings: RankSettings,
        ranks: Ranks,
        lease: RunLease,
        heart: HeartbeatThread,
        after: Callable[[str, int], None],
    ) -> None:
        self.settings, self.ranks, self.store, self.lease, self.heart, self.after = (
            settings,
            ranks,
            ranks.store,
            lease,
            heart,
            after,
        )
        self.saving: _Saving | None = None
        self.waited = 0.0
        self.board: Any = None
        if settings.tensorboard is not None and dist.get_rank() == 0:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(settings.tensorboard / lease.run_id), filename_suffix=f".e{lease.epoch}")
        self.config, model_path, self.stored = self.store.do(self._run)
        self.learner = RankLearner(model_path, self.config)
        self.push = self._make_push()
        if lease.uri is not None:
            self._announce_change()
            self.learner.load(lease.uri)

    def _make_push(self) -> WeightBroadcast | None:
        """None where engines read files. The same on every rank."""
        if self.config.training.weight_transport == "disk" or self.stored:
            return None
        if self.learner.device.type != "cuda":
            raise ValueError("training.weight_transport: nccl needs a GPU on the learner's first rank; use disk")
        try:
            return WeightBroadcast(NcclBroadcastGroup(self.learner.device.index), self.settings.policies)
        except ImportError as error:
            raise ValueError(
                f"training.weight_transport: nccl needs vLLM where the learner runs ({error}); use disk"
            ) from None

    def _announce_change(self) -> None:
        """Bit by bit a replay is the same only at equal world size and threads."""
        rows = self.store.do(lambda connection: checkpoints.list_checkpoints(connection, self.lease.run_id))
        now = {"world_size": dist.get_world_size(), "num_threads": self.settings.num_threads}
        before = [{name: getattr(row, name) for name in now} for row in rows if row.step == self.lease.step]
        if before and before[0] != now:
            _LOG.warning(
                "the learner's size has changed: replayed steps are equal in contents, not in bits",
                before=before[0],
                now=now,
            )

    async def _run(self, connection: AsyncConnection) -> tuple[RunConfig, Path, bool]:
        """The run's config; its initial weights: version 0's own copy, which outlives what the user named; whether another run's groups
        are trained on.
        """
        row = await runs.get_run(connection, self.lease.run_id)
        first = await runs.newest_version(connection, self.lease.run_id, 0)
        assert row is not None
        return (
            RunConfig.model_validate(row.config),
            Path(first.uri if first else row.model_path),
            row.source_run_id is not None,
        )

    def run(self) -> None:
        step = self.lease.step
        _LOG.info("learner ready", run=self.lease.run_id, epoch=self.lease.epoch, step=step, rank=self.learner.rank)
        while step < self.config.training.steps:
            step += 1
            self.heart.say("waiting for a plan", step)
            plan = self._plan(step)
            self.after("plan", step)
            self._step(plan)
            if step % self.config.training.checkpoint_every == 0 or step == self.config.training.steps:
                self._checkpoint(step)
        self._commit()
        if self.push is not None:
            self.push.close()
        self.heart.say("done", step)

    def _plan(self, step: int) -> Plan:
        """The step's plan row; a checkpoint that becomes complete meanwhile is committed. What waited for it is in `waited`."""
        started = time.monotonic()
        while (plan := self.ranks.together(lambda: self._wait_for_plan(step))) is None:
            self._commit()
        self.waited = time.monotonic() - started
        return plan

    def _wait_for_plan(self, step: int) -> Plan | None:
        """Polls the plan row; None where a checkpoint wants to be committed first. Raises FencedError where the run has ended or another
        learner has taken over.
        """
        lease = self.lease
        while True:
            if self.saving is not None and self.saving.done():
                return None
            planned = self.store.do(
                lambda connection: learners.is_step_planned(connection, lease.run_id, lease.epoch, step)
            )
            if planned is None:
                raise FencedError(f"{lease.run_id} has ended, or another learner has taken over")
            if planned:
                break
            time.sleep(_POLL_SECONDS)
        plan = self.store.do(lambda connection: planner.load_plan_row(connection, lease.run_id, step))
        assert plan is not None, "a plan row is never deleted"
        return plan

    def _step(self, plan: Plan) -> None:
        started = time.monotonic()
        self.heart.say("loading", plan.step)
        sequences = self._load(plan)
        loaded = time.monotonic()
        self.heart.say("stepping", plan.step)
        result = self.learner.step(plan, sequences)
        if not result.finite:
            self._refuse(plan.step)
        self.after("step", plan.step)
        seconds = time.monotonic() - loaded
        timings = {"wait_for_batch_seconds": self.waited, "load_seconds": loaded - started, "step_seconds": seconds}
        speed = speed_metrics(result.metrics, seconds, self.learner.world_size, self.learner.peak_flops)
        self._publish(plan.step, result.metrics | timings | speed | self._context(plan, sequences))

    def _load(self, plan: Plan) -> list[TrainingSequence]:
        trained = [member.rollout_id for member in plan.members if member.num_tokens > 0]
        sequences = self.store.do(lambda connection: planner.load_sequences(connection, trained, plan.min_policy_step))
        # Another run's versions say nothing about the age of these weights.
        return [replace(one, policy_steps=None) for one in sequences] if self.stored else sequences

    def _publish(self, step: int, metrics: dict[str, float]) -> None:
        """Files first, then their row with the step's metrics."""
        started = time.monotonic()
        self.heart.say(learners.PUBLISHING, step)
        directory = self.settings.policies / self.lease.run_id / f"{step}.e{self.lease.epoch}"
        files = self.learner.publish(directory)
        canary = self.learner.canary()
        self.after("write", step)
        metrics["publish_seconds"] = time.monotonic() - started
        self._ring(step, metrics)
        try:
            self.ranks.write(
                lambda connection: learner_commits.record_published(
                    connection, self.lease, step, directory, files, metrics, canary
                )
            )
        except FencedError:
            shutil.rmtree(directory, ignore_errors=True)  # named by this learner's epoch: nobody else's
            raise
        self.after("publish", step)
        if self.push is not None:
            self.ranks.together(self._push)
        self._retire(directory.parent)

    def _push(self) -> None:
        """What does not arrive, `learn.sync` brings. The next step waits for what does."""
        assert self.push is not None
        version = self.store.do(lambda connection: runs.newest_version(connection, self.lease.run_id))
        assert version is not None
        try:
            self.store.runner.run(self.push.send(self.store.database, version, self.config.engine.keep_cache))
        except StoreUnavailableError as error:
            _LOG.warning("weights not sent", version=version.version, reason=str(error))

    def _retire(self, directory: Path) -> None:
        """Files of versions that nobody will ask for again, and of those that were written and never published."""
        number = self.config.training.kept_versions
        if number is not None:
            kept = self.ranks.write(lambda connection: learner_commits.retire_versions(connection, self.lease, number))
            self.ranks.together(lambda: checkpoint.discard_checkpoint(directory, kept, self.lease.epoch))

    def _context(self, plan: Plan, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
        groups = self.store.do(
            lambda connection: group_selection.consumed_groups(connection, self.lease.run_id, plan.step)
        )
        return group_metrics(groups) | sequence_metrics(plan.step, sequences)

    def _ring(self, step: int, metrics: dict[str, float]) -> None:
        """Named alarms, once per step, in the log and as metrics; and all of it to TensorBoard."""
        if self.learner.rank != 0:
            return
        for name, meaning in alarms(metrics).items():
            _LOG.warning("alarm", alarm=name, run=self.lease.run_id, step=step, meaning=meaning)
            metrics[f"alarm_{name}"] = 1.0
        self._show(step, metrics)

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.board is not None:
            for name, value in metrics.items():
                self.board.add_scalar(f"training/{name}", value, step)
            self.board.flush()

    def _refuse(self, step: int) -> None:
        """The step is refused, the batch kept, the run paused with the reason. When it is resumed, a new learner replays."""
        reason = f"step {step}: the gradient is not finite; its batch is kept and no weights were published"
        self.ranks.write(lambda connection: learner_commits.pause_run(connection, self.lease, reason))
        raise FencedError(f"run {self.lease.run_id} is paused: {reason}")

    def _checkpoint(self, step: int) -> None:
        """Begins to write; the steps go on meanwhile. Until it is committed, a restart replays from the checkpoint before."""
        self._commit()
        self.heart.say("checkpointing", step)
        uri = str(self.settings.checkpoints / self.lease.run_id / f"step{step}.e{self.lease.epoch}")
        started = time.monotonic()
        future = self.learner.save_later(uri)
        self.saving = _Saving(step, uri, future, started, time.monotonic() - started)

    def _commit(self) -> None:
        """Waits for the checkpoint in flight, if any, and moves the run's pointer to it."""
        if self.saving is None:
            return
        step, uri = self.saving.step, self.saving.uri
        checkpoint.wait_for_save(self.saving.future)
        took = {
            "checkpoint_blocked_seconds": self.saving.blocked_seconds,
            "checkpoint_seconds": time.monotonic() - self.saving.started,
        }
        self.saving = None
        self.after("save", step)
        size, threads = self.learner.world_size, self.settings.num_threads
        try:
            kept = self.ranks.write(
                lambda connection: learner_commits.commit_checkpoint(
                    connection, self.lease, step, uri, size, threads, took
                )
            )
        except FencedError:
            shutil.rmtree(uri, ignore_errors=True)
            raise
        self.after("commit", step)
        self._show(step, took)
        self.ranks.together(lambda: checkpoint.discard_checkpoint(Path(uri).parent, kept, self.lease.epoch))


@dataclass(slots=True, frozen=True)
class _Saving:
    """A checkpoint that is being written. Rank 0's future is done when all ranks' files and the metadata are there.

    `started`: by the monotonic clock; `blocked_seconds`: while the state was copied and no step could be trained.
    """

    step: int
    uri: str
    future: "Future[Any]"
    started: float
    blocked_seconds: float

    def done(self) -> bool:
        return self.future.done()


def run_driver(settings: RankSettings, num_workers: int) -> None:
    """Runs the ranks under Ray Train until the run has ended; a dead rank restarts the group from the checkpoint."""
    import ray
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    class Trainer(TorchTrainer):  # type: ignore[misc]  # Ray is untyped
        def _create_default_callbacks(self) -> list[Any]:
            # The cleaner is a detached actor, which outlives a killed driver, for ever where the cluster has no dashboard to ask; our
            # ranks and their placement group belong to the driver's job and end with it. And plan rows need no actors of Ray Data.
            unused = ("PlacementGroupCleanerCallback", "DatasetsCallback")
            return [
                callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in unused
            ]

    if not ray.is_initialized():
        ray.init(
            address=os.environ.get("RAY_ADDRESS", "auto"),
            namespace=settings.run_id,
            log_to_driver=True,
            logging_level="ERROR",
        )
    use_gpu = torch.cuda.is_available()
    trainer = Trainer(
        lambda values: train_rank(RankSettings(**values)),
        train_loop_config={field.name: getattr(settings, field.name) for field in fields(settings)},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker={"CPU": 1}),
        run_config=train.RunConfig(
            name=settings.run_id,
            storage_path=str(settings.checkpoints / "ray"),
            failure_config=train.FailureConfig(max_failures=-1),
        ),
    )
    trainer.fit()
