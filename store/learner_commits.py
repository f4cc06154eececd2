"""The transactions of a learner: its lease on a run, published versions, and the checkpoint commit.

Every write is fenced by the run's epoch, so that a learner that was replaced changes nothing. The checkpoint pointer
and the consumption of batches move in one transaction; exactly-once training rests on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Select, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from ratchet.errors import FencedError
from ratchet.token_statistics import TrainedTurn
from ratchet.types import (
    OPEN_STATES,
    BatchState,
    JsonObject,
    PolicyVersionState,
    Purpose,
    RunState,
    chained_versions,
    policy_version,
)
from store import learners
from store.checkpoints import best_checkpoint
from store.metrics import record_metrics
from store.open_runs import pause_run
from store.schema import (
    BatchItemTable,
    BatchTable,
    CheckpointTable,
    PolicyVersionTable,
    RolloutTable,
    RunTable,
    TurnTable,
)
from store.token_statistics import record_step_tokens, record_trained_turns

KEPT_CHECKPOINTS = 2
"""Number of checkpoints of a run that are kept, beside that of its best step."""
MAX_FAILURES = 3
"""Learners of a run that may fail by an unexpected error without a new checkpoint between them; then the run is
paused."""


@dataclass(slots=True, frozen=True)
class RunLease:
    """A learner's lease on a run. Writes carry `epoch`; `step` and `uri`: the checkpoint that it starts from."""

    run_id: str
    epoch: int
    step: int
    uri: str | None


class KeptVersions(NamedTuple):
    """The URIs of a run's published versions, and the versions whose files at an address they are made of."""

    uris: list[str]
    chained: set[str]


async def take_lease(connection: AsyncConnection, run_id: str, written: int = 0) -> RunLease:
    """Raise the run's epoch above earlier learners' and `written` files'. Raises FencedError unless it runs."""
    statement = (
        update(RunTable)
        .where(RunTable.run_id == run_id, RunTable.state == RunState.RUNNING)
        .values(epoch=func.greatest(RunTable.epoch, written) + 1)
        .returning(RunTable.epoch, RunTable.checkpoint_step, RunTable.checkpoint_uri)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise FencedError(f"run {run_id} is not running")
    return RunLease(run_id, row.epoch, row.checkpoint_step, row.checkpoint_uri)


async def hold_lease(connection: AsyncConnection, lease: RunLease) -> None:
    """Lock the run's row until the transaction ends. Raises FencedError if another learner has taken over."""
    statement = (
        select(RunTable.run_id)
        .where(RunTable.run_id == lease.run_id, RunTable.epoch == lease.epoch)
        .with_for_update(key_share=True)
    )
    if (await connection.execute(statement)).one_or_none() is None:
        raise FencedError(f"another learner has taken over {lease.run_id}")


async def record_published(
    connection: AsyncConnection,
    lease: RunLease,
    step: int,
    uri: str,
    files: list[JsonObject],
    metrics: Mapping[str, float],
    canary: JsonObject | None = None,
    tokens: Sequence[Mapping[str, Any]] = (),
    turns: Sequence[TrainedTurn] = (),
) -> None:
    """Record the published version, the batch's state `stepped`, the step's metrics, the tokens whose ratios are
    furthest from 1 and what the learner saw of all trained ones, in one transaction.

    Call it after the files are written and fsynced, and stored at `uri` if that is an address. Running it again changes
    nothing. Raises FencedError.
    """
    await hold_lease(connection, lease)
    version = policy_version(lease.run_id, step, lease.epoch)
    values = {"run_id": lease.run_id, "step": step, "epoch": lease.epoch, "uri": uri, "files": files, "canary": canary}
    await connection.execute(insert(PolicyVersionTable).values(version=version, **values).on_conflict_do_nothing())
    stepping = update(BatchTable).where(
        BatchTable.run_id == lease.run_id, BatchTable.step == step, BatchTable.state != BatchState.COMMITTED
    )
    done = {"state": BatchState.STEPPED, "epoch": lease.epoch, "metrics": dict(metrics), "stepped_at": func.now()}
    await connection.execute(stepping.values(**done))
    await connection.execute(
        update(RunTable).where(RunTable.run_id == lease.run_id).values(step=func.greatest(RunTable.step, step))
    )
    await record_metrics(connection, lease.run_id, step, metrics)
    await record_step_tokens(connection, lease.run_id, step, tokens)
    await record_trained_turns(connection, lease.run_id, step, turns)


async def retire_versions(connection: AsyncConnection, lease: RunLease, num_kept: int) -> KeptVersions:
    """Retire old published versions; return those that remain.

    The newest version of each of these steps remains: the newest `num_kept` steps, the steps of the kept checkpoints,
    the run's best step, and step 0. Raises FencedError.
    """
    await hold_lease(connection, lease)
    version = PolicyVersionTable
    columns = select(version.version, version.step, version.uri, version.files).order_by(version.step.desc())
    of_run = (PolicyVersionTable.run_id == lease.run_id) & (PolicyVersionTable.state == PolicyVersionState.PUBLISHED)
    rows = (await connection.execute(columns.where(of_run).order_by(PolicyVersionTable.epoch.desc()))).all()
    saved = _newest_checkpoints(lease.run_id, CheckpointTable.step).limit(KEPT_CHECKPOINTS)
    newest = list(dict.fromkeys(row.step for row in rows))[:num_kept]
    best = select(RunTable.best_step).where(RunTable.run_id == lease.run_id)
    steps = {0, *newest, *(await connection.execute(saved)).scalars(), *(await connection.execute(best)).scalars()}
    remaining = {row.step: row for row in reversed(rows) if row.step in steps}
    old = [row.version for row in rows if row not in remaining.values()]
    retiring = update(PolicyVersionTable).where(PolicyVersionTable.version.in_(old))
    await connection.execute(retiring.values(state=PolicyVersionState.RETIRED))
    kept = remaining.values()
    return KeptVersions([row.uri for row in kept], set().union(*(chained_versions(row.files) for row in kept)))


async def commit_checkpoint(
    connection: AsyncConnection,
    lease: RunLease,
    step: int,
    uri: str,
    world_size: int,
    num_threads: int,
    metrics: Mapping[str, float],
) -> list[str]:
    """Move the checkpoint pointer and mark all batches up to `step` as committed: THE commit point of training.

    The same transaction ends a run without rollouts after its last step. Returns the URIs of the checkpoints to keep.
    Running it again changes nothing. Raises FencedError if another learner has taken over or has committed this step.
    """
    await hold_lease(connection, lease)
    moving = update(RunTable).where(
        RunTable.run_id == lease.run_id, or_(RunTable.checkpoint_step < step, RunTable.checkpoint_uri == uri)
    )
    if (await connection.execute(moving.values(checkpoint_step=step, checkpoint_uri=uri))).rowcount != 1:
        raise FencedError(f"checkpoint {step} of {lease.run_id} exists already")
    consuming = update(BatchTable).where(
        BatchTable.run_id == lease.run_id, BatchTable.step <= step, BatchTable.state != BatchState.COMMITTED
    )
    await connection.execute(consuming.values(state=BatchState.COMMITTED, committed_at=func.now()))
    values = {"epoch": lease.epoch, "uri": uri, "world_size": world_size, "num_threads": num_threads}
    row = insert(CheckpointTable).values(run_id=lease.run_id, step=step, **values)
    await connection.execute(row.on_conflict_do_update(index_elements=["run_id", "step"], set_=values))
    await record_metrics(connection, lease.run_id, step, metrics)
    await _end_run_without_rollouts(connection, lease, step)
    newest = _newest_checkpoints(lease.run_id, CheckpointTable.uri).limit(KEPT_CHECKPOINTS)
    best = await connection.execute(best_checkpoint(lease.run_id))
    return list(dict.fromkeys([*(await connection.execute(newest)).scalars(), *best.scalars()]))


def _newest_checkpoints(run_id: str, column: InstrumentedAttribute[Any]) -> Select[Any]:
    """Select a column of the run's checkpoints, the newest first."""
    return select(column).where(CheckpointTable.run_id == run_id).order_by(CheckpointTable.step.desc())


async def drop_routed_experts(connection: AsyncConnection, lease: RunLease) -> None:
    """Drop the recorded experts of rollouts that will not be trained again: of the groups that steps up to the oldest
    kept checkpoint have consumed, and of evaluations that have ended.

    No group's are dropped before the run has KEPT_CHECKPOINTS. Running it again changes nothing. Raises FencedError.
    """
    await hold_lease(connection, lease)
    newest = _newest_checkpoints(lease.run_id, CheckpointTable.step).offset(KEPT_CHECKPOINTS - 1).limit(1)
    consumed = select(BatchItemTable.group_id).where(
        BatchItemTable.run_id == lease.run_id, BatchItemTable.step <= newest.scalar_subquery()
    )
    is_evaluation = (RolloutTable.purpose != Purpose.TRAIN) & RolloutTable.outcome.is_not(None)
    of_rollouts = select(RolloutTable.id).where(
        RolloutTable.run_id == lease.run_id, or_(RolloutTable.group_id.in_(consumed), is_evaluation)
    )
    recorded = TurnTable.routed_experts.is_not(None) & TurnTable.rollout_id.in_(of_rollouts)
    await connection.execute(update(TurnTable).where(recorded).values(routed_experts=None))


async def fall_back(connection: AsyncConnection, lease: RunLease, step: int, uri: str) -> None:
    """Move the checkpoint pointer back to an older checkpoint, because the newer ones are damaged.

    The steps after it are trained again from their plan rows. Running it again changes nothing. Raises FencedError.
    """
    await hold_lease(connection, lease)
    pointing = update(RunTable).where(RunTable.run_id == lease.run_id)
    await connection.execute(pointing.values(checkpoint_step=step, checkpoint_uri=uri))
    later = (BatchTable.run_id == lease.run_id, BatchTable.step > step, BatchTable.state == BatchState.COMMITTED)
    await connection.execute(update(BatchTable).where(*later).values(state=BatchState.STEPPED, committed_at=None))
    damaged = delete(CheckpointTable).where(CheckpointTable.run_id == lease.run_id, CheckpointTable.step > step)
    await connection.execute(damaged)


async def fail_run(connection: AsyncConnection, lease: RunLease, world_size: int, reason: str) -> None:
    """Count the failure of this learner; pause the run with the reason after MAX_FAILURES failures without a
    checkpoint.

    Running it again changes nothing, also from several ranks. Raises FencedError.
    """
    await hold_lease(connection, lease)
    statement = select(RunTable.checkpoint_step).where(RunTable.run_id == lease.run_id)
    committed = (await connection.execute(statement)).scalar_one()
    count = await learners.count_learner_failure(connection, lease.run_id, lease.epoch, world_size, committed)
    if count >= MAX_FAILURES:
        await pause_run(connection, lease.run_id, reason, epoch=lease.epoch)


async def _end_run_without_rollouts(connection: AsyncConnection, lease: RunLease, step: int) -> None:
    """End a run on stored groups in the transaction of its last checkpoint, so that a crash afterwards loses nothing.

    No workflow exists that would end it. Other runs are ended by their workflow.
    """
    is_last = RunTable.source_run_id.is_not(None) & (RunTable.config["training"]["steps"].as_integer() <= step)
    ending = update(RunTable).where(RunTable.run_id == lease.run_id, RunTable.state.in_(OPEN_STATES), is_last)
    await connection.execute(ending.values(state=RunState.DONE, state_reason="", ended_at=func.now()))
