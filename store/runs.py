"""Runs: their row, their task order, and the counts that TrainRun decides by.

State changes are single statements with the expected old state in the WHERE clause; the states and their transitions
are listed at `ratchet.types.RunState`.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Self

from sqlalchemy import case, func, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import ConfigError
from ratchet.grading_payloads import LabelledTask
from ratchet.lora_slots import FIRST_SLOT
from ratchet.steering import with_last_step
from ratchet.stored_config import config_digest, known_digests, read_stored_config
from ratchet.types import OPEN_STATES, GroupState, JsonObject, Purpose, RunState, Wish
from store.columns import columns_of, count_rows, read_one
from store.groups import training_groups_of
from store.schema import PolicyVersionTable, RolloutGroupTable, RolloutTable, RunTable, RunTaskTable, TaskTable

ADHOC = "adhoc"
"""Config name of runs that hold rollouts started by hand."""


@dataclass(slots=True, frozen=True)
class RunFields:
    """The fields of a run that it goes on by or that are shown; `RunTable` describes the columns."""

    run_id: str
    state: str
    wish: str
    config: JsonObject
    config_digest: str
    seed: int
    model_path: str
    step: int
    epoch: int
    checkpoint_step: int
    state_reason: str
    source_run_id: str | None
    stop_at: int | None
    best_step: int | None
    best_rate: float | None
    config_name: str
    next_group_no: int
    engine_set: str
    lora_slot: int

    @property
    def is_by_hand(self) -> bool:
        """True if its rollouts are started by hand; such a run trains nothing and never ends."""
        return self.config_name == ADHOC


@dataclass(slots=True, frozen=True)
class RunRow(RunFields):
    """A run as it is stored."""

    @property
    def resolved_config(self) -> RunConfig:
        """The config under which the run goes on now; a run that is stopped has no steps after that one."""
        return with_last_step(read_stored_config(self.config), self.stop_at)


@dataclass(slots=True, frozen=True)
class NewRun:
    """The row of a run. `config`: the resolved config. `source_run_id`: for a run that trains on another's rollouts."""

    run_id: str
    config: JsonObject
    config_digest: str
    config_name: str
    seed: int
    model_path: str
    init_from: str | None = None
    source_run_id: str | None = None
    engine_set: str = DEFAULT_SET
    lora_slot: int = FIRST_SLOT

    @classmethod
    def of_config(
        cls,
        run_id: str,
        name: str,
        config: RunConfig,
        model: Path | None,
        source_run_id: str | None = None,
        lora_slot: int = FIRST_SLOT,
    ) -> Self:
        """Take the row's values from a resolved config. `name`: its name. `model`: directory, None for an endpoint."""
        return cls(
            run_id=run_id,
            config=config.model_dump(mode="json"),
            config_digest=config_digest(config),
            config_name=name,
            seed=config.seed,
            model_path="" if model is None else str(model),
            init_from=config.init_from,
            source_run_id=source_run_id,
            engine_set=config.engine_set,
            lora_slot=lora_slot,
        )


_COLUMNS = columns_of(RunRow, RunTable)
_OPEN = RunTable.state.in_(OPEN_STATES)


async def get_run(connection: AsyncConnection, run_id: str) -> RunRow | None:
    return await read_one(connection, RunRow, select(*_COLUMNS).where(RunTable.run_id == run_id))


async def the_run(connection: AsyncConnection, run_id: str) -> RunRow:
    """Return the run. Raises ConfigError if it does not exist."""
    if (row := await get_run(connection, run_id)) is None:
        raise ConfigError(f"there is no run {run_id!r}; `ratchet show runs` lists those that there are")
    return row


async def newest_unfinished_run(
    connection: AsyncConnection, config: RunConfig, source_run_id: str | None = None
) -> str | None:
    """Return the run that `ratchet train` continues, with or without `--from-store`."""
    same = (
        RunTable.config_digest.in_(known_digests(config))
        & (RunTable.config_name != ADHOC)
        & RunTable.source_run_id.is_not_distinct_from(source_run_id)
    )
    statement = select(RunTable.run_id).where(same, _OPEN)
    return (await connection.execute(statement.order_by(RunTable.created_at.desc()).limit(1))).scalar_one_or_none()


async def newest_stopped_run(connection: AsyncConnection, config: RunConfig) -> str | None:
    """Return the newest training run with this config that failed, was stopped or cancelled, to be resumed."""
    statement = select(RunTable.run_id, RunTable.state).where(
        RunTable.config_digest.in_(known_digests(config)),
        RunTable.config_name != ADHOC,
        RunTable.source_run_id.is_(None),
    )
    row = (await connection.execute(statement.order_by(RunTable.created_at.desc()).limit(1))).one_or_none()
    ended_early = (RunState.STOPPED, RunState.FAILED, RunState.CANCELLED)
    return row.run_id if row is not None and row.state in ended_early else None


async def create_run(connection: AsyncConnection, new: NewRun) -> bool:
    """Insert the run's row; return False if it exists already."""
    result = await connection.execute(pg_insert(RunTable).values(**asdict(new)).on_conflict_do_nothing())
    return result.rowcount == 1


async def set_run_config(connection: AsyncConnection, run_id: str, config: JsonObject) -> None:
    """Replace the config in the transaction that creates the run; the digest stays that of the requested config."""
    await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(config=config))


async def end_run(
    connection: AsyncConnection, run_id: str, state: RunState, reason: str = "", last_step: int | None = None
) -> bool:
    """End a running or paused run; an ended one keeps its state.

    `last_step`: the step that was the run's last when its end was decided. Returns False, and leaves the run open, if
    a person has extended or resumed it since.
    """
    locked = select(*_COLUMNS).where(RunTable.run_id == run_id).with_for_update(key_share=True)
    run = RunRow(*(await connection.execute(locked)).one())
    if last_step is not None and run.resolved_config.training.steps != last_step:
        return False
    statement = update(RunTable).where(RunTable.run_id == run_id, _OPEN)
    ended = {"state": state, "state_reason": reason, "wish": Wish.NONE, "ended_at": func.now()}
    await connection.execute(statement.values(**ended))
    return True


async def count_restart(connection: AsyncConnection, run_id: str) -> int:
    """Count that the sweep starts the run's workflow again; return the number of restarts without an hour between."""
    recent = RunTable.restarted_at > func.now() - timedelta(hours=1)
    statement = (
        update(RunTable)
        .where(RunTable.run_id == run_id)
        .values(restarts=case((recent, RunTable.restarts + 1), else_=1), restarted_at=func.now())
        .returning(RunTable.restarts)
    )
    return int((await connection.execute(statement)).scalar_one())


class OrderedTask(NamedTuple):
    """A task of a run, and which of the config's datasets it comes from."""

    task_id: int
    dataset_no: int


async def set_task_order(
    connection: AsyncConnection, run_id: str, purpose: Purpose, tasks: Sequence[OrderedTask]
) -> None:
    """Store the order in which the run visits the tasks of one purpose; an existing order stays."""
    if tasks:
        rows = [{"run_id": run_id, "purpose": purpose, "position": n, **one._asdict()} for n, one in enumerate(tasks)]
        await connection.execute(pg_insert(RunTaskTable).on_conflict_do_nothing(), rows)


async def publish_initial(
    connection: AsyncConnection, version: str, run_id: str, uri: str, files: list[JsonObject]
) -> None:
    """Insert the row of the initial weights, step 0; safe to repeat."""
    values = {"version": version, "run_id": run_id, "step": 0, "epoch": 0, "uri": uri, "files": files}
    await connection.execute(pg_insert(PolicyVersionTable).values(**values).on_conflict_do_nothing())


async def newest_version(
    connection: AsyncConnection, run_id: str, step: int | None = None, before: int | None = None
) -> PolicyVersionTable | None:
    """Return the newest weights of a run, of one step, or of the steps before one; the higher epoch wins."""
    statement = select(PolicyVersionTable).where(
        PolicyVersionTable.run_id == run_id, PolicyVersionTable.state == "published"
    )
    if step is not None:
        statement = statement.where(PolicyVersionTable.step == step)
    if before is not None:
        statement = statement.where(PolicyVersionTable.step < before)
    newest = statement.order_by(PolicyVersionTable.step.desc(), PolicyVersionTable.epoch.desc()).limit(1)
    return await read_one(connection, PolicyVersionTable, newest)


async def published_steps(connection: AsyncConnection, run_id: str, limit: int = 5) -> list[int]:
    """Return the newest steps of which the run has published weights, the newest first."""
    step = PolicyVersionTable.step
    statement = select(step).where(PolicyVersionTable.run_id == run_id, PolicyVersionTable.state == "published")
    return list((await connection.execute(statement.distinct().order_by(step.desc()).limit(limit))).scalars())


async def count_groups(connection: AsyncConnection, run_id: str) -> dict[str, int]:
    """Return the number of the run's training groups by state."""
    statement = (
        select(RolloutGroupTable.state, func.count())
        .where(RolloutGroupTable.run_id == run_id, RolloutGroupTable.purpose == Purpose.TRAIN)
        .group_by(RolloutGroupTable.state)
    )
    return {state: count for state, count in await connection.execute(statement)}


async def count_open_members(connection: AsyncConnection, run_id: str) -> int:
    """Return the number of rollouts without an outcome in the run's open training groups."""
    statement = (
        select(func.count())
        .select_from(RolloutTable)
        .join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        .where(training_groups_of(run_id, GroupState.OPEN), RolloutTable.outcome.is_(None))
    )
    return int((await connection.execute(statement)).scalar_one())


@dataclass(slots=True, frozen=True)
class OpenGroup:
    """An open training group. `started_step`: the newest published step when it was made."""

    id: int
    workflow_id: str
    task_label: str
    started_step: int


async def open_groups(connection: AsyncConnection, run_id: str) -> list[OpenGroup]:
    """Return the run's open training groups, oldest first."""
    statement = (
        select(RolloutGroupTable.id, RolloutGroupTable.workflow_id, TaskTable.label, RolloutGroupTable.started_step)
        .join(TaskTable, TaskTable.id == RolloutGroupTable.task_id)
        .where(training_groups_of(run_id, GroupState.OPEN))
        .order_by(RolloutGroupTable.id)
    )
    return [OpenGroup(*row) for row in await connection.execute(statement)]


async def published_step(connection: AsyncConnection, run_id: str) -> int:
    """Return the newest published step of the run, 0 before the first."""
    statement = select(func.max(PolicyVersionTable.step)).where(PolicyVersionTable.run_id == run_id)
    return int((await connection.execute(statement)).scalar_one() or 0)


async def take_group_numbers(connection: AsyncConnection, run_id: str, count: int) -> int:
    """Reserve `count` consecutive group numbers and return the first."""
    statement = (
        update(RunTable)
        .where(RunTable.run_id == run_id)
        .values(next_group_no=RunTable.next_group_no + count)
        .returning(RunTable.next_group_no)
    )
    return int((await connection.execute(statement)).scalar_one()) - count


async def positions_in_turn(
    connection: AsyncConnection, run_id: str, purpose: Purpose, first: int, count: int, left_out: Collection[int]
) -> list[int]:
    """Return the positions of `count` tasks, the group number `first` deciding where in the run's order to begin.

    The tasks in `left_out`, by id, are skipped. Empty if no task is left.
    """
    num_tasks = await count_run_tasks(connection, run_id, purpose)
    skipped: list[int] = []
    if left_out:
        statement = select(RunTaskTable.position).where(
            RunTaskTable.run_id == run_id, RunTaskTable.purpose == purpose, RunTaskTable.task_id.in_(left_out)
        )
        skipped = sorted((await connection.execute(statement)).scalars())
    num_left = num_tasks - len(skipped)
    positions = [(first + n) % num_left for n in range(count)] if num_left else []
    for one in skipped:  # ascending, so that each moves the places behind it by one
        positions = [position + (position >= one) for position in positions]
    return positions


async def set_waiting_reason(connection: AsyncConnection, run_id: str, reason: str) -> None:
    """Record why a running run starts no new groups; empty if it does."""
    statement = update(RunTable).where(
        RunTable.run_id == run_id, RunTable.state == RunState.RUNNING, RunTable.state_reason != reason
    )
    await connection.execute(statement.values(state_reason=reason))


async def run_tasks_at(
    connection: AsyncConnection, run_id: str, purpose: Purpose, positions: Sequence[int]
) -> list[LabelledTask]:
    """Return the tasks at these positions of the run's order."""
    statement = (
        select(RunTaskTable.position, TaskTable.id, TaskTable.label)
        .join(TaskTable, TaskTable.id == RunTaskTable.task_id)
        .where(
            RunTaskTable.run_id == run_id, RunTaskTable.purpose == purpose, RunTaskTable.position.in_(set(positions))
        )
    )
    rows = await connection.execute(statement)
    found = {position: LabelledTask(task_id, label) for position, task_id, label in rows}
    return [found[position] for position in positions]


async def count_run_tasks(connection: AsyncConnection, run_id: str, purpose: Purpose) -> int:
    return await count_rows(connection, RunTaskTable.run_id == run_id, RunTaskTable.purpose == purpose)
