"""Runs: their row, their wishes, their task order, and what TrainRun decides by.

Why here: one file per aggregate; state changes are single statements with the expected old state in the WHERE clause.
Called by: `activities/run_lifecycle.py`, the learner (fencing) and the CLI.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.store.schema import PolicyVersionTable, RolloutGroupTable, RunTable, RunTaskTable, TaskTable
from ratchet.types import GroupState, Purpose, RunState, Wish

ADHOC = "adhoc"
_ONE_OPEN_RUN = 0x52415443  # an advisory lock's key, any number that nobody else uses


@dataclass(slots=True, frozen=True)
class RunRow:
    run_id: str
    state: str
    wish: str
    config: dict[str, Any]
    config_digest: str
    seed: int
    model_path: str
    step: int
    epoch: int
    checkpoint_step: int
    state_reason: str
    source_run_id: str | None


_COLUMNS = (
    RunTable.run_id,
    RunTable.state,
    RunTable.wish,
    RunTable.config,
    RunTable.config_digest,
    RunTable.seed,
    RunTable.model_path,
    RunTable.step,
    RunTable.epoch,
    RunTable.checkpoint_step,
    RunTable.state_reason,
    RunTable.source_run_id,
)
_OPEN = RunTable.state.in_((RunState.RUNNING, RunState.PAUSED))


async def get_run(connection: AsyncConnection, run_id: str) -> RunRow | None:
    row = (await connection.execute(select(*_COLUMNS).where(RunTable.run_id == run_id))).one_or_none()
    return RunRow(*row) if row else None


async def newest_unfinished_run(
    connection: AsyncConnection, config_digest: str, source_run_id: str | None = None
) -> str | None:
    """The run that `ratchet train` continues, `--from-store` included."""
    same = (
        (RunTable.config_digest == config_digest)
        & (RunTable.config_name != ADHOC)
        & RunTable.source_run_id.is_not_distinct_from(source_run_id)
    )
    statement = select(RunTable.run_id).where(same, _OPEN)
    return (await connection.execute(statement.order_by(RunTable.created_at.desc()).limit(1))).scalar_one_or_none()


async def newest_done_run(connection: AsyncConnection, config_digest: str) -> str | None:
    statement = select(RunTable.run_id).where(RunTable.config_digest == config_digest, RunTable.state == RunState.DONE)
    return (await connection.execute(statement.order_by(RunTable.created_at.desc()).limit(1))).scalar_one_or_none()


async def unfinished_runs(connection: AsyncConnection) -> list[str]:
    """Training runs whose workflow must exist."""
    statement = select(RunTable.run_id).where(_OPEN, RunTable.config_name != ADHOC, RunTable.source_run_id.is_(None))
    return list((await connection.execute(statement)).scalars())


async def require_no_other_run(connection: AsyncConnection, run_id: str) -> None:
    """Until the transaction ends no other training can begin. Raises ConfigError where one is open: the engines serve one policy, and
    rollouts of two runs would be sampled by each other's weights.
    """
    await connection.execute(select(func.pg_advisory_xact_lock(_ONE_OPEN_RUN)))
    for other in await unfinished_runs(connection):
        if other != run_id:
            raise ConfigError(
                f"run {other} is still open, and the engines serve one policy at a time: wait for its end, cancel it "
                f"(`temporal workflow cancel --workflow-id run/{other}`, or in the UI), or train this one in a checkout of its own"
            )


async def create_run(connection: AsyncConnection, values: dict[str, Any]) -> bool:
    """Idempotent by run_id; False where the row was there already."""
    result = await connection.execute(pg_insert(RunTable).values(**values).on_conflict_do_nothing())
    return result.rowcount == 1


async def set_run_config(connection: AsyncConnection, run_id: str, config: dict[str, Any]) -> None:
    """For the transaction that makes the run: what it will really do, under the digest of what was asked for."""
    await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(config=config))


async def end_run(connection: AsyncConnection, run_id: str, state: RunState, reason: str = "") -> None:
    statement = update(RunTable).where(
        RunTable.run_id == run_id, RunTable.state.in_([RunState.RUNNING, RunState.PAUSED])
    )
    await connection.execute(statement.values(state=state, state_reason=reason, ended_at=func.now()))


async def resume_run(connection: AsyncConnection, run_id: str) -> str | None:
    """`paused` → `running`; returns why it was paused, None where it was not. What groups did not teach before is forgiven."""
    statement = (
        select(RunTable.state_reason)
        .where(RunTable.run_id == run_id, RunTable.state == RunState.PAUSED)
        .with_for_update()
    )
    reason = (await connection.execute(statement)).scalar_one_or_none()
    if reason is not None:
        going = update(RunTable).where(RunTable.run_id == run_id)
        await connection.execute(
            going.values(state=RunState.RUNNING, state_reason="", patient_from=RunTable.next_group_no)
        )
    return reason


async def set_wish(connection: AsyncConnection, run_id: str, wish: Wish, update_id: str) -> None:
    """Keyed by the update's id: the same wish delivered twice is one wish."""
    statement = update(RunTable).where(RunTable.run_id == run_id, RunTable.wish_update_id.is_distinct_from(update_id))
    await connection.execute(statement.values(wish=wish, wish_update_id=update_id))


async def set_task_order(connection: AsyncConnection, run_id: str, purpose: Purpose, task_ids: Sequence[int]) -> None:
    if task_ids:
        rows = [
            {"run_id": run_id, "purpose": purpose, "position": n, "task_id": task} for n, task in enumerate(task_ids)
        ]
        await connection.execute(pg_insert(RunTaskTable).on_conflict_do_nothing(), rows)


async def publish_initial(
    connection: AsyncConnection, version: str, run_id: str, uri: str, files: list[dict[str, Any]]
) -> None:
    values = {"version": version, "run_id": run_id, "step": 0, "epoch": 0, "uri": uri, "files": files}
    await connection.execute(pg_insert(PolicyVersionTable).values(**values).on_conflict_do_nothing())


async def newest_version(
    connection: AsyncConnection, run_id: str, step: int | None = None
) -> PolicyVersionTable | None:
    """The newest published weights of a run, of one step where given; the higher epoch wins."""
    statement = select(PolicyVersionTable).where(
        PolicyVersionTable.run_id == run_id, PolicyVersionTable.state == "published"
    )
    if step is not None:
        statement = statement.where(PolicyVersionTable.step == step)
    row = (
        await connection.execute(
            statement.order_by(PolicyVersionTable.step.desc(), PolicyVersionTable.epoch.desc()).limit(1)
        )
    ).one_or_none()
    return PolicyVersionTable(**row._mapping) if row else None


async def count_groups(connection: AsyncConnection, run_id: str) -> dict[str, int]:
    """Training groups of a run by state."""
    statement = (
        select(RolloutGroupTable.state, func.count())
        .where(RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.TRAIN)
        .group_by(RolloutGroupTable.state)
    )
    return {state: count for state, count in await connection.execute(statement)}


async def open_groups(connection: AsyncConnection, run_id: str) -> list[tuple[int, str, str, int]]:
    """(id, workflow id, task label, started step) of the training groups that are open."""
    statement = (
        select(RolloutGroupTable.id, RolloutGroupTable.workflow_id, TaskTable.label, RolloutGroupTable.started_step)
        .join(TaskTable, TaskTable.id == RolloutGroupTable.task_id)
        .where(
            RolloutGroupTable.run_id == run_id,
            RolloutGroupTable.purpose == Purpose.TRAIN,
            RolloutGroupTable.state == GroupState.OPEN,
        )
        .order_by(RolloutGroupTable.id)
    )
    return [(row[0], row[1], row[2], row[3]) for row in await connection.execute(statement)]


async def published_step(connection: AsyncConnection, run_id: str) -> int:
    statement = select(func.max(PolicyVersionTable.step)).where(PolicyVersionTable.run_id == run_id)
    return int((await connection.execute(statement)).scalar_one() or 0)


async def take_group_numbers(connection: AsyncConnection, run_id: str, count: int) -> int:
    """The first of `count` group numbers that belong to the caller from now on."""
    statement = (
        update(RunTable)
        .where(RunTable.run_id == run_id)
        .values(next_group_no=RunTable.next_group_no + count)
        .returning(RunTable.next_group_no)
    )
    return int((await connection.execute(statement)).scalar_one()) - count


async def run_tasks_at(
    connection: AsyncConnection, run_id: str, purpose: Purpose, positions: Sequence[int]
) -> list[tuple[int, str]]:
    """(task id, label) at these positions of the run's order."""
    statement = (
        select(RunTaskTable.position, TaskTable.id, TaskTable.label)
        .join(TaskTable, TaskTable.id == RunTaskTable.task_id)
        .where(
            RunTaskTable.run_id == run_id, RunTaskTable.purpose == purpose, RunTaskTable.position.in_(set(positions))
        )
    )
    found = {position: (task_id, label) for position, task_id, label in await connection.execute(statement)}
    return [found[position] for position in positions]


async def count_run_tasks(connection: AsyncConnection, run_id: str, purpose: Purpose) -> int:
    statement = (
        select(func.count())
        .select_from(RunTaskTable)
        .where(RunTaskTable.run_id == run_id, RunTaskTable.purpose == purpose)
    )
    return int((await connection.execute(statement)).scalar_one())
