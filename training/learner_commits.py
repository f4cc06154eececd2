"""A learner's hold on its run, and every transaction that it writes under it: all of them fenced by the run's epoch.

Why here: pointer and consumption move in one transaction; that is what exactly-once rests on.
Called by: `training/ray_driver.py`; `training/rank_runtime.py` beats its heart under it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import FencedError
from ratchet.store import learners
from ratchet.store import metrics as recorded
from ratchet.store.schema import BatchTable, CheckpointTable, PolicyVersionTable, RunTable
from ratchet.types import BatchState, PolicyVersionState, RunState, policy_version

KEPT = 2
"""Checkpoints of a run that stay."""
MAX_FAILURES = 3
"""Learners of a run that may end by an error of the code's own, one after the other, without a checkpoint between them."""


@dataclass(slots=True, frozen=True)
class RunLease:
    """This learner's hold on a run: every write carries `epoch`; `step` and `uri` are the checkpoint pointer it starts from."""

    run_id: str
    epoch: int
    step: int
    uri: str | None


async def take_lease(connection: AsyncConnection, run_id: str) -> RunLease:
    """Raises the run's epoch: whatever an earlier learner still writes matches no row from now on."""
    statement = (
        update(RunTable)
        .where(RunTable.run_id == run_id, RunTable.state == RunState.RUNNING)
        .values(epoch=RunTable.epoch + 1)
        .returning(RunTable.epoch, RunTable.checkpoint_step, RunTable.checkpoint_uri)
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise FencedError(f"run {run_id} is not running")
    return RunLease(run_id, row.epoch, row.checkpoint_step, row.checkpoint_uri)


async def hold_lease(connection: AsyncConnection, lease: RunLease) -> None:
    """Locks the run's row for this transaction; raises FencedError where another learner has taken over."""
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
    directory: Path,
    files: list[dict[str, Any]],
    metrics: Mapping[str, float],
    canary: dict[str, Any] | None = None,
) -> None:
    """The files are there and fsynced; now the row, the batch's state and the metrics, in one transaction. Again is harmless."""
    await hold_lease(connection, lease)
    version = policy_version(lease.run_id, step, lease.epoch)
    values = {
        "run_id": lease.run_id,
        "step": step,
        "epoch": lease.epoch,
        "uri": str(directory),
        "files": files,
        "canary": canary,
    }
    await connection.execute(insert(PolicyVersionTable).values(version=version, **values).on_conflict_do_nothing())
    stepping = update(BatchTable).where(
        BatchTable.run_id == lease.run_id, BatchTable.step == step, BatchTable.state != BatchState.COMMITTED
    )
    done = {"state": BatchState.STEPPED, "epoch": lease.epoch, "metrics": dict(metrics), "stepped_at": func.now()}
    await connection.execute(stepping.values(**done))
    await connection.execute(
        update(RunTable).where(RunTable.run_id == lease.run_id).values(step=func.greatest(RunTable.step, step))
    )
    await recorded.record_metrics(connection, lease.run_id, step, metrics)


async def retire_versions(connection: AsyncConnection, lease: RunLease, kept: int) -> list[str]:
    """Of the published versions only those of the newest `kept` steps, of the kept checkpoints' and of step 0 remain, each step's newest;
    returns their uris.
    """
    await hold_lease(connection, lease)
    columns = select(PolicyVersionTable.version, PolicyVersionTable.step, PolicyVersionTable.uri).order_by(
        PolicyVersionTable.step.desc()
    )
    mine = (PolicyVersionTable.run_id == lease.run_id) & (PolicyVersionTable.state == PolicyVersionState.PUBLISHED)
    rows = (await connection.execute(columns.where(mine).order_by(PolicyVersionTable.epoch.desc()))).all()
    saved = (
        select(CheckpointTable.step)
        .where(CheckpointTable.run_id == lease.run_id)
        .order_by(CheckpointTable.step.desc())
        .limit(KEPT)
    )
    newest = list(dict.fromkeys(row.step for row in rows))[:kept]
    steps = {0, *newest, *(await connection.execute(saved)).scalars()}
    remaining = {row.step: row for row in reversed(rows) if row.step in steps}
    old = [row.version for row in rows if row not in remaining.values()]
    retiring = update(PolicyVersionTable).where(PolicyVersionTable.version.in_(old))
    await connection.execute(retiring.values(state=PolicyVersionState.RETIRED))
    return [row.uri for row in remaining.values()]


async def commit_checkpoint(
    connection: AsyncConnection,
    lease: RunLease,
    step: int,
    uri: str,
    world_size: int,
    num_threads: int,
    metrics: Mapping[str, float],
) -> list[str]:
    """THE commit point: checkpoint pointer and consumption in one transaction, and the end of a run without rollouts. Returns the uris to
    keep. Again is harmless.
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
    await recorded.record_metrics(connection, lease.run_id, step, metrics)
    await _end_stored(connection, lease, step)
    newest = (
        select(CheckpointTable.uri)
        .where(CheckpointTable.run_id == lease.run_id)
        .order_by(CheckpointTable.step.desc())
        .limit(KEPT)
    )
    return list((await connection.execute(newest)).scalars())


async def pause_run(connection: AsyncConnection, lease: RunLease, reason: str) -> None:
    """The run waits for a human; its batches stay as they are. Nothing happens where another learner has taken over."""
    statement = update(RunTable).where(
        RunTable.run_id == lease.run_id, RunTable.epoch == lease.epoch, RunTable.state == RunState.RUNNING
    )
    await connection.execute(statement.values(state=RunState.PAUSED, state_reason=reason))


async def fail_run(connection: AsyncConnection, lease: RunLease, world_size: int, reason: str) -> None:
    """This learner ends by an error of the code's own, which another start may not mend: the last of MAX_FAILURES pauses the run.

    Again is harmless, also from several ranks.
    """
    await hold_lease(connection, lease)
    committed = (
        await connection.execute(select(RunTable.checkpoint_step).where(RunTable.run_id == lease.run_id))
    ).scalar_one()
    if (
        await learners.count_learner_failure(connection, lease.run_id, lease.epoch, world_size, committed)
        >= MAX_FAILURES
    ):
        await pause_run(connection, lease, reason)


async def _end_stored(connection: AsyncConnection, lease: RunLease, step: int) -> None:
    """A run without rollouts has nobody else to end it: it is done with its last checkpoint, and a learner killed right after owes nothing."""
    last = RunTable.source_run_id.is_not(None) & (RunTable.config["training"]["steps"].as_integer() <= step)
    ending = update(RunTable).where(
        RunTable.run_id == lease.run_id, RunTable.state.in_((RunState.RUNNING, RunState.PAUSED)), last
    )
    await connection.execute(ending.values(state=RunState.DONE, state_reason="", ended_at=func.now()))
