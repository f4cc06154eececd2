"""The training loop of one rank, from its checkpoint to the run's last step. It depends on neither Ray nor torchrun.

One step, with the function of each arrow:

    plan row (table `batch`, written by `planner.plan_step`)
        | TrainLoop._wait_for_plan, TrainLoop._load_sequences        training/planner.py
    chains (token ids, trained mask, recorded logprobs)
        | deal_bins, pack_bin                                        training/packing.py
    bins (one forward pass each)
        | TrainablePolicy.forward, token_loss, backward              training/policy_model.py, training/loss.py
    gradients
        | RankLearner.step -> RankLearner._update (clip, AdamW)      training/learner.py
    new weights
        | CheckpointWriter.start, .commit (every k steps)            training/checkpoint_writer.py
        | Publisher.publish (every step): files, row, canary         training/publisher.py
    published version
        | the activity `learn.sync`                                  engine/weight_update.py
    engines that serve the new weights

A learner takes a lease that raises the run's epoch, loads the checkpoint and runs steps until the run ends. A kill at
any line replays the steps after the checkpoint with the same contents, and the writes of a learner that was replaced
match no row. Only rank 0 reads plans and writes the store; it sends every outcome to the other ranks, so that all
ranks take the same next step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import structlog
import torch
import torch.distributed as dist

from engine.policy_cache import PolicyCache
from ratchet import secrets
from ratchet.errors import ConfigError, FencedError, StoreUnavailableError
from ratchet.stored_config import read_stored_config
from store import evaluations, learner_commits, learners, runs, training_groups
from store.checkpoints import CheckpointRow, list_checkpoints
from store.learner_commits import RunLease
from store.learners import NextStep
from store.metrics import read_metric, read_metric_values, record_metrics
from store.open_runs import pause_run
from training import planner
from training.checkpoint import DamagedCheckpointError, newest_epoch
from training.checkpoint_writer import CheckpointWriter
from training.learner import RankLearner, StepResult
from training.metric_sinks.fan_out import MetricSinks
from training.metric_sinks.sink import SinkRun
from training.metrics import group_metrics, replay_metrics, sequence_metrics, speed_metrics
from training.plan_types import Plan, TrainingSequence
from training.publisher import Publisher
from training.rank_runtime import BlockingStore, HeartbeatThread, RankContext, Ranks, RankSettings, lost_peer

_LOG = structlog.get_logger()

_POLL_SECONDS = 0.2
_READ_TRIES, _READ_PAUSE_SECONDS = 3, 2.0


def train_rank(settings: RankSettings, after_point: Callable[[str, int], None] = lambda point, step: None) -> None:
    """Run one rank until the run has ended, is paused, or another learner has taken over. Needs a process group.

    `after_point(point, step)` is called after the points `plan`, `step`, `write` (of the weight files), `publish` (of
    their row), `save` (of the checkpoint files) and `commit`; the fault tests end the process there.
    """
    torch.set_num_threads(settings.num_threads)
    structlog.contextvars.bind_contextvars(run_id=settings.run_id)
    store = BlockingStore(settings.database_url)
    sinks = MetricSinks()
    try:
        ranks = Ranks(store)
        written = newest_epoch(settings.policies / settings.run_id, settings.checkpoints / settings.run_id)
        lease = ranks.transaction(learner_commits.take_lease, settings.run_id, written)
        heartbeat = HeartbeatThread(settings, lease, dist.get_world_size())
        with heartbeat.running(enabled=dist.get_rank() == 0):
            _train_under_lease(RankContext(settings, lease, ranks, heartbeat, sinks, after_point))
    except FencedError as error:
        _LOG.info("learner stops", run=settings.run_id, reason=str(error))
    finally:
        sinks.close()
        store.close()


def _train_under_lease(context: RankContext) -> None:
    """Run the loop; record a failure of the config or the code with the run, so that a person sees its reason."""
    lease = context.lease
    try:
        TrainLoop(context).run()
    except (ConfigError, ValueError) as error:
        # The config, model or batch cannot be trained; every rank raises it, and another start would not help.
        reason = f"the learner cannot go on: {error}"
        context.ranks.transaction(pause_run, lease.run_id, reason, lease.epoch)
        _LOG.error("learner stops", run=lease.run_id, reason=reason)
    except (FencedError, StoreUnavailableError):
        raise
    except Exception as error:
        # A bug, perhaps on this rank only. The other ranks wait in a collective, so this rank writes by itself and
        # ends; that ends the others.
        if not lost_peer(error):
            first_line = f"{type(error).__name__}: {error}".splitlines()[0][:300]  # torch appends whole stack traces
            reason = f"the learner failed {learner_commits.MAX_FAILURES} times: {first_line}"
            world_size = context.heartbeat.world_size
            context.store.transaction(learner_commits.fail_run, lease, world_size, reason)
        raise


class TrainLoop:
    """The steps of one rank. All ranks construct it and call `run` together."""

    def __init__(self, context: RankContext) -> None:
        """Load the model and the checkpoint. Raises ValueError if the config, model or checkpoint cannot be used."""
        self.context = context
        self.lease = context.lease
        row = context.store.transaction(runs.the_run, self.lease.run_id)
        first = context.store.transaction(runs.newest_version, self.lease.run_id, 0)
        self.config = read_stored_config(row.config)
        self.is_stored = row.source_run_id is not None  # it trains on another run's groups, and has no rollouts
        if context.settings.metrics is not None and dist.get_rank() == 0:
            # Sinks upload the config: without literal secrets of old runs, and without the options of all sinks.
            shown = secrets.redact_config(self.config.model_dump(mode="json", exclude={"metrics"}))
            sunk = SinkRun(self.lease.run_id, self.lease.epoch, context.settings.metrics, shown)
            context.sinks.open(self.config.metrics.sinks, sunk)
        cache = PolicyCache(context.settings.policies)
        # Version 0 exists even if the user deletes the model that the config names.
        uri, files = (row.model_path, []) if first is None else (first.uri, first.files)
        model_path = context.when_storage_answers(lambda: cache.fetch(uri, files))
        self.learner = RankLearner(model_path, self.config)
        self.publisher = Publisher(context, self.learner, self.config)
        self.checkpoints = CheckpointWriter(context, self.learner)
        if self.lease.uri is not None:
            self.lease = self._load_newest_checkpoint(self.lease.uri)

    def _load_newest_checkpoint(self, newest_uri: str) -> RunLease:
        """Load the newest checkpoint that can be read, and return the lease with its step. A collective.

        The pointer is moved back only after an older one is loaded, so a directory that is not mounted costs nothing.
        Raises ValueError if none can be read, or if the newest one is of another model.
        """
        lease = self.lease
        rows = self.context.store.transaction(list_checkpoints, lease.run_id)
        found = [(lease.step, newest_uri), *((row.step, row.uri) for row in rows if row.step < lease.step)]
        reasons = []
        for step, uri in found:
            _warn_if_size_changed(self.context, [row for row in rows if row.step == step])
            damage = self._try_to_load(uri)
            if damage:
                _LOG.error("a checkpoint is damaged", run=lease.run_id, step=step, reason=damage)
                reasons.append(damage)
                continue
            if step != lease.step:
                move = partial(learner_commits.fall_back, lease=lease, step=step, uri=uri)
                self.context.ranks.transaction(move)
            return replace(lease, step=step, uri=uri)
        raise ValueError(f"none of the {len(found)} checkpoints can be read: {reasons[0]}")

    def _try_to_load(self, uri: str) -> str:
        """Load a checkpoint; return what is damaged, empty if nothing is. A collective: every rank returns the same.

        It is read several times before it counts as damaged, because a file system may fail for a moment.
        """
        for number in range(_READ_TRIES):
            if number:
                time.sleep(_READ_PAUSE_SECONDS)
            try:
                self.learner.load(uri)
                return ""
            except DamagedCheckpointError as error:
                damage = str(error)
        return damage

    def run(self) -> None:
        """Train from the checkpoint to the last step, which a person may move while the run goes on.

        Raises FencedError if the run ends or is taken over meanwhile.
        """
        step = saved = self.lease.step
        _LOG.info("learner ready", run=self.lease.run_id, epoch=self.lease.epoch, step=step, rank=self.learner.rank)
        while self._train_step(step + 1):
            step += 1
            if step % self.config.training.checkpoint_every == 0:
                self.checkpoints.start(step)
                saved = step
        if saved != step:
            self.checkpoints.start(step)
        self.checkpoints.commit()
        self._close_sinks(step)
        self.context.heartbeat.set_phase(learners.TRAINED_ALL, step)

    def _close_sinks(self, step: int) -> None:
        """Record what the sinks lose at the end with the last step, beside what they lost before it."""
        lost = self.context.sinks.close()
        store, run_id = self.context.store, self.lease.run_id
        for name, number in lost.items():
            before = store.transaction(partial(read_metric, run_id=run_id, step=step, name=name)) or 0.0
            values = {name: before + number, "alarm_metric_sink": 1.0}
            store.transaction(partial(record_metrics, run_id=run_id, step=step, values=values))

    def _train_step(self, step: int) -> bool:
        """Wait for the step's plan row, train it, and publish the new weights with the step's metrics.

        Return False if the run ends before this step.
        """
        waiting = time.monotonic()
        self.context.heartbeat.set_phase(learners.WAITING, step)
        plan = self._wait_for_plan(step)
        if plan is None:
            return False
        self.context.after_point("plan", step)

        loading = time.monotonic()
        self.context.heartbeat.set_phase("loading", step)
        sequences = self._load_sequences(plan)

        stepping = time.monotonic()
        self.context.heartbeat.set_phase("stepping", step)
        result = self.learner.step(plan, sequences)
        if result.num_skipped:
            self._pause_if_skipped_too_often(step)
        self.context.after_point("step", step)

        timings = {
            "wait_for_batch_seconds": loading - waiting,
            "load_seconds": stepping - loading,
            "step_seconds": time.monotonic() - stepping,
        }
        metrics = self._step_metrics(plan, sequences, result, timings)
        self.context.heartbeat.set_phase(learners.EVALUATED, step)
        while not self.context.ranks.on_rank_zero(lambda: self._poll_evaluations(step)):
            self.checkpoints.commit()
        self.publisher.publish(step, metrics, result.largest_ratios, result.trained_turns)
        return True

    def _wait_for_plan(self, step: int) -> Plan | None:
        """Return the step's plan, None if there is no such step; commit a checkpoint that becomes complete while
        waiting. A collective."""
        while (found := self.context.ranks.on_rank_zero(lambda: self._poll_plan(step))) is None:
            self.checkpoints.commit()
        return found if isinstance(found, Plan) else None

    def _poll_plan(self, step: int) -> Plan | NextStep | None:
        """Poll for the plan row, on rank 0; return NextStep.NONE if there is no such step, None if a checkpoint must be
        committed first.

        Raises FencedError if the run has ended or another learner has taken over.
        """
        lease = self.lease
        store = self.context.store
        while not self.checkpoints.is_written():
            found = self._next_step(step)
            if found is NextStep.NONE:
                return found
            if found is NextStep.PLANNED:
                plan = store.transaction(planner.load_step_plan, lease.run_id, step)
                if plan is not None:  # else it was discarded, and the next look finds this learner fenced
                    return plan
            time.sleep(_POLL_SECONDS)
        return None

    def _next_step(self, step: int) -> NextStep:
        """Raises FencedError if the run has ended or another learner has taken over."""
        lease = self.lease
        found = self.context.store.transaction(learners.next_step, lease.run_id, lease.epoch, step)
        if found is NextStep.FENCED:
            raise FencedError(f"{lease.run_id} has ended, or another learner has taken over")
        return found

    def _poll_evaluations(self, step: int) -> bool:
        """Wait on rank 0 until no evaluation samples the version that this step's replaces; return False if a
        checkpoint must be committed first. Raises FencedError."""
        while self.context.store.transaction(evaluations.is_being_evaluated, self.lease.run_id):
            if self.checkpoints.is_written():
                return False
            self._next_step(step)
            time.sleep(_POLL_SECONDS)
        return True

    def _load_sequences(self, plan: Plan) -> list[TrainingSequence]:
        trained = [member.rollout_id for member in plan.members if member.num_tokens > 0]
        sequences = self.context.store.transaction(
            planner.load_sequences, trained, plan.min_policy_step, self.config.training.router_replay
        )
        is_stored = self.is_stored or "source_run_id" in plan.knobs
        # The versions of another run do not give the age of a token relative to these weights.
        return [replace(one, policy_steps=None) for one in sequences] if is_stored else sequences

    def _step_metrics(
        self, plan: Plan, sequences: list[TrainingSequence], result: StepResult, timings: dict[str, float]
    ) -> dict[str, float]:
        groups = self.context.store.transaction(training_groups.consumed_groups, self.lease.run_id, plan.step)
        seconds = timings["step_seconds"]
        speed = speed_metrics(result.metrics, seconds, self.learner.world_size, self.learner.peak_flops)
        of_sequences = sequence_metrics(plan.step, sequences) | replay_metrics(sequences)
        return result.metrics | timings | speed | group_metrics(groups) | of_sequences

    def _pause_if_skipped_too_often(self, step: int) -> None:
        """Pause the run, and keep its batch, if too many steps in a row had a gradient that is not finite.

        A collective. Raises FencedError then, on every rank: the skipped update is in this learner's state. After a
        resume a new learner replays the batch.
        """
        bound = self.config.training.max_skipped_steps
        steps = range(step - bound, step)
        reader = partial(read_metric_values, run_id=self.lease.run_id, steps=steps, name="skipped_updates")
        before = self.context.ranks.transaction(reader)
        if not all(before.get(one, 0.0) > 0 for one in steps):
            return
        reason = (
            f"step {step}: the gradient is not finite, as in the {bound} steps before it (training.max_skipped_steps); "
            "its batch is kept and no weights were published; `ratchet resume RUN --skip-step -m REASON` discards it"
        )
        lease = self.lease
        self.context.ranks.transaction(pause_run, lease.run_id, reason, lease.epoch)
        raise FencedError(f"run {lease.run_id} is paused: {reason}")


def _warn_if_size_changed(context: RankContext, rows: Sequence[CheckpointRow]) -> None:
    """Warn if a replay is not bit-identical: it is only with the world size and threads that wrote the checkpoint."""
    now = {"world_size": dist.get_world_size(), "num_threads": context.settings.num_threads}
    before = [{name: getattr(row, name) for name in now} for row in rows]
    if before and before[0] != now:
        _LOG.warning(
            "the learner's size has changed: replayed steps are equal in contents, not in bits",
            before=before[0],
            now=now,
        )
