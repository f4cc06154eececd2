"""Publish the weights of a step: write the files, record the version, send it to the engines, retire old versions.

With `training.weights_address` the files are stored there, too, before the version is recorded: whole or, with
`training.full_weights_every`, mostly as deltas to the version before.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import structlog

from engine import weight_deltas, weight_storage
from engine.policy_files import policy_directory
from engine.weight_deltas import LocalVersion
from ratchet.config import RunConfig
from ratchet.errors import FencedError, WeightStorageError
from ratchet.token_statistics import TrainedToken, TrainedTurn
from ratchet.types import JsonObject, policy_version
from store import engines, learner_commits, learners, runs
from training import checkpoint
from training.learner import RankLearner
from training.metrics import alarms
from training.rank_runtime import RankContext

_LOG = structlog.get_logger()


class Publisher:
    """Publishes every step's weights. The files are complete before the row that names them exists."""

    def __init__(self, context: RankContext, learner: RankLearner, config: RunConfig) -> None:
        self.context = context
        self.learner = learner
        self.config = config
        self.address = config.training.weights_address

    def publish(
        self,
        step: int,
        metrics: dict[str, float],
        tokens: Sequence[TrainedToken] = (),
        turns: Sequence[TrainedTurn] = (),
    ) -> None:
        """Write the weights and record them with the step's metrics, `tokens` and `turns`. A collective of all ranks.

        Raises FencedError if another learner has taken over; the files are then deleted.
        """
        context = self.context
        context.heartbeat.set_phase(learners.PUBLISHING, step)
        version = policy_version(context.lease.run_id, step, context.lease.epoch)
        directory = context.settings.policies / version
        started = time.monotonic()
        files = self.learner.publish(directory)
        canary = self.learner.canary()
        context.after_point("write", step)
        metrics["publish_seconds"] = time.monotonic() - started
        uri = str(directory)
        if self.address is not None:
            uri = weight_storage.version_address(self.address, version)
            written = LocalVersion(version, directory, files)
            files = context.ranks.on_rank_zero(lambda: self._upload(written, step, uri, metrics))
            context.after_point("upload", step)
        self._raise_alarms(step, metrics)
        try:
            context.ranks.transaction(
                learner_commits.record_published,
                context.lease,
                step,
                uri,
                files,
                metrics,
                canary,
                list(map(asdict, tokens)),
                turns,
            )
        except FencedError:
            # The directory's name has this learner's epoch, so no other learner uses it. What is left at the address
            # is deleted by the next learner (`_retire_versions`).
            shutil.rmtree(directory, ignore_errors=True)
            raise
        context.after_point("publish", step)
        self._retire_versions(directory.parent)

    def _upload(self, written: LocalVersion, step: int, uri: str, metrics: dict[str, float]) -> list[JsonObject]:
        """Store a version at the address, too, and wait for as long as it is unavailable; return the files of its row.

        Raises FencedError.
        """
        started = time.monotonic()
        directory = written.directory
        deltas = directory.with_name(f"{directory.name}.deltas")  # the next learner deletes it if this one is killed
        stored: set[str] = set()
        try:
            files = self._with_deltas(written, step, deltas)
            version = LocalVersion(written.version, directory, files)
            self.context.when_storage_answers(lambda: weight_deltas.upload(version, deltas, uri, stored))
        except FencedError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(deltas, ignore_errors=True)
        metrics["upload_seconds"] = time.monotonic() - started
        metrics["upload_bytes"] = float(weight_deltas.stored_bytes(files))
        metrics["version_bytes"] = float(sum(file["bytes"] for file in files))
        return files

    def _with_deltas(self, written: LocalVersion, step: int, deltas: Path) -> list[JsonObject]:
        """Write the deltas of a version, if it is to have some; return the files of its row.

        An engine that cannot fetch may wait for a damaged delta, so the next version is then whole.
        """
        run_id, store = self.context.lease.run_id, self.context.store
        num_links = self.config.training.full_weights_every
        engine_set = self.config.engine_set
        before = None
        if num_links > 1 and not store.transaction(engines.cannot_fetch, engine_set):
            before = store.transaction(runs.newest_version, run_id, None, step)
        if before is None:
            return list(written.files)
        here = policy_directory(before.uri, self.context.settings.policies)
        try:
            earlier = LocalVersion(before.version, here, before.files)
            return weight_deltas.with_deltas(written, earlier, deltas, num_links)
        except OSError as error:
            _LOG.warning("weights stored whole", version=written.version, reason=str(error))
            return list(written.files)

    def _raise_alarms(self, step: int, metrics: dict[str, float]) -> None:
        """Log the step's alarms and add them to its metrics; hand all of them to the sinks. Only on rank 0."""
        if self.learner.rank != 0:
            return
        metrics |= self.context.sinks.lost_metrics()
        for name, meaning in alarms(metrics).items():
            _LOG.warning("alarm", alarm=name, run=self.context.lease.run_id, step=step, meaning=meaning)
            metrics[f"alarm_{name}"] = 1.0
        self.context.sinks.write(step, metrics)

    def _retire_versions(self, directory: Path) -> None:
        """Delete the files of retired versions, and of versions that were written but never published."""
        num_kept = self.config.training.kept_versions
        if num_kept is None:
            return
        lease = self.context.lease
        kept = self.context.ranks.transaction(learner_commits.retire_versions, lease, num_kept)
        self.context.ranks.on_rank_zero(lambda: checkpoint.discard_all_but(directory, kept.uris, lease.epoch))
        if self.address is not None:
            self.context.ranks.on_rank_zero(lambda: self._delete_stored_but([*kept.uris, *kept.chained]))

    def _delete_stored_but(self, kept: Sequence[str]) -> None:
        """Delete all other versions at the address. If it is unavailable, the next step's publisher does it."""
        assert self.address is not None
        lease = self.context.lease
        try:
            stored = weight_storage.list_versions(self.address, lease.run_id)
            for name in checkpoint.discarded(stored, kept, lease.epoch):
                weight_storage.delete_version(weight_storage.version_address(self.address, f"{lease.run_id}/{name}"))
        except WeightStorageError as error:
            _LOG.warning("old weights not deleted", reason=str(error))
