"""Retention: which runs may be pruned, and the rows that move from the store to the archive.

Three columns of `run` say how far a run is pruned:

| pruned_at | archived_at | what holds                                                                             |
|-----------|-------------|----------------------------------------------------------------------------------------|
| NULL      | NULL        | all rows are in the store                                                              |
| set       | NULL        | the run cannot be resumed; rows of rollouts up to `archived_to` (an id) are archived   |
| set       | set         | the rows of all its rollouts are archived                                              |

`begin_prune` writes `pruned_at`, `drop_archived_rows` moves `archived_to` on, and `end_archive` writes `archived_at`;
none of them goes back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, exists, func, literal, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import DeclarativeBase, aliased

from ratchet.errors import ConfigError, FencedError
from ratchet.types import OPEN_STATES, JsonObject, PolicyVersionState, RunState, chained_versions
from store.arrays import pack_text
from store.checkpoints import best_checkpoint
from store.columns import count_rows
from store.runs import ADHOC
from store.schema import (
    AttemptTable,
    BatchItemTable,
    ChainSpanTable,
    ChainTable,
    GradeTable,
    PolicyVersionTable,
    RolloutGroupTable,
    RolloutTable,
    RolloutWordsTable,
    RunTable,
    TrainedTurnTable,
    TurnTable,
)

ARCHIVED_TABLES: dict[str, type[DeclarativeBase]] = {
    "turn": TurnTable,
    "chain": ChainTable,
    "chain_span": ChainSpanTable,
    "attempt": AttemptTable,
    "grade": GradeTable,
    "trained_turn": TrainedTurnTable,
}
"""Tables whose rows are archived. Turns, chains and what the learner saw of them are then deleted; of attempts and
grades, only the logs are."""


@dataclass(slots=True, frozen=True)
class EndedRun:
    """A run that is done for long, or pruned. `config`: as it is stored."""

    run_id: str
    config: JsonObject
    is_pruned: bool


@dataclass(slots=True, frozen=True)
class KeptFiles:
    """Names of the directories of an ended run that stay: of published weights and of checkpoints.

    `stored`: those at an address, which are those of the published weights and what their files are made of.
    """

    versions: set[str]
    checkpoints: set[str]
    stored: set[str]


async def runs_to_archive(connection: AsyncConnection, days: float | None) -> list[str]:
    """Return runs that are done since `days` (None: none) or begun to be archived, the longest ended first."""
    begun = RunTable.pruned_at.is_not(None)
    due = or_(begun, _is_done_since(days)) if days is not None else begun
    statement = select(RunTable.run_id).where(RunTable.archived_at.is_(None), due)
    return list((await connection.execute(statement.order_by(RunTable.ended_at))).scalars())


async def runs_without_use_of_weights(connection: AsyncConnection, days: float | None) -> list[EndedRun]:
    """Return the runs that are done since `days` (None: no such run) or are pruned."""
    pruned = RunTable.pruned_at.is_not(None)
    due = or_(pruned, _is_done_since(days)) if days is not None else pruned
    rows = await connection.execute(select(RunTable.run_id, RunTable.config, pruned).where(due))
    return [EndedRun(*row) for row in rows]


def _is_done_since(days: float) -> ColumnElement[bool]:
    ended = RunTable.ended_at < func.now() - timedelta(days=days)
    return (RunTable.state == RunState.DONE) & ended & (RunTable.config_name != ADHOC)


async def begin_prune(connection: AsyncConnection, run_id: str, force: bool = False) -> None:
    """Record that the run is being pruned, after which it cannot be resumed. A repeated call changes nothing.

    `force`: also if the run has failed or was cancelled and could be resumed. Raises ConfigError if the run does not
    exist, is open, could be resumed, has rollouts in flight, or if an open run trains on its stored turns.
    """
    # FOR UPDATE keeps out `resume_run`, `is_pruned`, and the insertion of a run that trains on this one.
    if not await may_prune(connection, run_id, force, lock=True):
        return
    await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(pruned_at=func.now()))


async def may_prune(connection: AsyncConnection, run_id: str, force: bool, lock: bool = False) -> bool:
    """Return False if the run is being pruned already. Raises ConfigError as `begin_prune` does."""
    statement = select(RunTable.state, RunTable.pruned_at, RunTable.config_name).where(RunTable.run_id == run_id)
    row = (await connection.execute(statement.with_for_update() if lock else statement)).one_or_none()
    if row is None:
        raise ConfigError(f"there is no run {run_id!r}; `ratchet show runs` lists those that there are")
    if row.pruned_at is not None:
        return False
    if row.state in OPEN_STATES:
        what = "it holds rollouts that are started by hand" if row.config_name == ADHOC else "cancel it first"
        raise ConfigError(f"run {run_id} is {row.state} and is not pruned; {what}")
    if row.state != RunState.DONE and not force:
        raise ConfigError(
            f"run {run_id} is {row.state} and can be resumed, which pruning makes impossible; add --force to prune it"
        )
    in_flight = exists().where(RolloutTable.run_id == run_id, RolloutTable.outcome.is_(None))
    if (await connection.execute(select(in_flight))).scalar_one():
        raise ConfigError(f"run {run_id} has rollouts in flight and is not pruned; try again when they have ended")
    forked = RunTable.config["evaluation"]["forked_turn_id"].as_integer()
    begins = select(RunTable.run_id).join(TurnTable, TurnTable.id == forked).where(RunTable.state.in_(OPEN_STATES))
    of_run = begins.join(RolloutTable, RolloutTable.id == TurnTable.rollout_id).where(RolloutTable.run_id == run_id)
    if (fork := (await connection.execute(of_run.limit(1))).scalar_one_or_none()) is not None:
        raise ConfigError(f"run {run_id} is not pruned, because the rollouts of run {fork} begin with its turns")
    user = select(RunTable.run_id).join(BatchItemTable, BatchItemTable.run_id == RunTable.run_id)
    user = user.join(RolloutGroupTable, RolloutGroupTable.id == BatchItemTable.group_id)
    other = (RolloutGroupTable.run_id == run_id, RunTable.run_id != run_id, RunTable.pruned_at.is_(None))
    found = await connection.scalar(user.where(*other, RunTable.state != RunState.DONE).limit(1))
    if found is not None:
        raise ConfigError(f"run {run_id} is not pruned, because run {found} trains on its stored turns")
    return True


async def is_pruned(connection: AsyncConnection, run_id: str) -> bool:
    """Return whether the run is pruned, and keep it from being pruned until the transaction ends."""
    statement = select(RunTable.pruned_at).where(RunTable.run_id == run_id)
    found = await connection.execute(statement.with_for_update(read=True, key_share=True))
    return found.scalar_one_or_none() is not None


async def require_turns(connection: AsyncConnection, run_id: str) -> None:
    """Keep the run's turns in the store until the transaction ends. Raises ConfigError if they are archived."""
    if await is_pruned(connection, run_id):
        raise ConfigError(
            f"the turns of run {run_id} are archived: read `archive/{run_id}` of the state directory, for example with "
            "pandas.read_parquet"
        )


async def begin_part(connection: AsyncConnection, run_id: str) -> int:
    """Return the id of the last rollout whose rows are archived, 0 before the first; the begin of a transaction.

    All later statements of the transaction see the same rows, and no other process archives the run until it ends.
    Raises FencedError if another one does.
    """
    await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
    statement = select(RunTable.archived_to).where(RunTable.run_id == run_id)
    found = (await connection.execute(statement.with_for_update(skip_locked=True, key_share=True))).scalar_one_or_none()
    if found is None:
        raise FencedError(f"another process archives run {run_id}")
    return int(found)


async def count_rollouts_to_archive(connection: AsyncConnection, run_id: str) -> int:
    """Return the number of the run's rollouts whose rows are not archived."""
    after = select(RunTable.archived_to).where(RunTable.run_id == run_id).scalar_subquery()
    return await count_rows(connection, RolloutTable.run_id == run_id, RolloutTable.id > after)


async def next_rollouts(connection: AsyncConnection, run_id: str, after: int, count: int) -> list[int]:
    """Return the ids of the run's next rollouts after the id `after`."""
    statement = select(RolloutTable.id).where(RolloutTable.run_id == run_id, RolloutTable.id > after)
    return list((await connection.execute(statement.order_by(RolloutTable.id).limit(count))).scalars())


async def rows_to_archive(connection: AsyncConnection, table: str, rollout_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of these rollouts in one of ARCHIVED_TABLES."""
    kind = ARCHIVED_TABLES[table]
    statement: Select[Any] = select(kind)
    if kind is ChainSpanTable:
        chain = aliased(ChainTable)
        statement = statement.join(chain, chain.id == ChainSpanTable.chain_id).where(chain.rollout_id.in_(rollout_ids))
    else:
        statement = statement.where(kind.rollout_id.in_(rollout_ids))  # type: ignore[attr-defined]
    return [dict(row._mapping) for row in await connection.execute(statement)]


async def end_archive(connection: AsyncConnection, run_id: str) -> None:
    """Record that the rows of all rollouts of the run are archived."""
    ending = update(RunTable).where(RunTable.run_id == run_id, RunTable.archived_at.is_(None))
    await connection.execute(ending.values(archived_at=func.now()))


async def drop_archived_rows(connection: AsyncConnection, run_id: str, after: int, last: int) -> None:
    """Drop the archived rows of the rollouts in (`after`, `last`], and record it, in `begin_part`'s transaction."""
    ids = select(RolloutTable.id).where(RolloutTable.run_id == run_id, RolloutTable.id > after, RolloutTable.id <= last)
    moving = update(RunTable).where(RunTable.run_id == run_id)
    await connection.execute(moving.values(archived_to=last))
    await connection.execute(delete(ChainTable).where(ChainTable.rollout_id.in_(ids)))
    await connection.execute(delete(TrainedTurnTable).where(TrainedTurnTable.rollout_id.in_(ids)))
    await connection.execute(delete(TurnTable).where(TurnTable.rollout_id.in_(ids)))
    await connection.execute(delete(RolloutWordsTable).where(RolloutWordsTable.rollout_id.in_(ids)))
    attempts = update(AttemptTable).where(AttemptTable.rollout_id.in_(ids))
    await connection.execute(attempts.values(transcript=None, workspace_log=None))
    await connection.execute(update(GradeTable).where(GradeTable.rollout_id.in_(ids)).values(log=pack_text("")))


async def kept_files(connection: AsyncConnection, run_id: str) -> KeptFiles:
    """Return the files of an ended run that are still needed.

    The kept weights are the newest ones, those of the best step, those of step 0, which tell architecture and
    tokenizer, and those that another run was started from; the kept checkpoints are the newest and the best.
    """
    version = PolicyVersionTable
    needed = (await connection.execute(select(version.uri, version.files).where(*_needed_versions(run_id)))).all()
    pointer = select(RunTable.checkpoint_uri).where(RunTable.run_id == run_id)
    best = await connection.execute(best_checkpoint(run_id))
    checkpoints = [*(await connection.execute(pointer)).scalars(), *best.scalars()]
    versions = _names(row.uri for row in needed)
    chained = _names(set().union(*(chained_versions(row.files) for row in needed)))
    return KeptFiles(versions, _names(uri for uri in checkpoints if uri), versions | chained)


async def retire_weights(connection: AsyncConnection, run_id: str) -> None:
    """Retire the published weights of an ended run that are not among its `kept_files`."""
    published, needed = _needed_versions(run_id)
    retiring = update(PolicyVersionTable).where(published, ~needed)
    await connection.execute(retiring.values(state=PolicyVersionState.RETIRED))


def _needed_versions(run_id: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Return the conditions that a version is published, and that it is needed."""
    published = (PolicyVersionTable.run_id == run_id) & (PolicyVersionTable.state == PolicyVersionState.PUBLISHED)
    version = aliased(PolicyVersionTable)
    of_run = (version.run_id == run_id) & (version.state == PolicyVersionState.PUBLISHED)
    newest = select(func.max(version.step)).where(of_run).scalar_subquery()
    begun = aliased(RunTable)  # its model_path is the version's directory, also if the version has an address
    begun_from = exists().where(begun.model_path.endswith(literal("/") + PolicyVersionTable.version))
    best = select(RunTable.best_step).where(RunTable.run_id == run_id).scalar_subquery()
    needed = or_(PolicyVersionTable.step.in_([0, newest]), func.coalesce(PolicyVersionTable.step == best, False))
    return published, or_(needed, begun_from)


def _names(uris: Iterable[str]) -> set[str]:
    """Return the last parts of paths or versions; another machine may mount the same directory elsewhere."""
    return {uri.rstrip("/").rpartition("/")[2] for uri in uris}
