"""Prune ended runs: move their turns and logs to Parquet files, delete weights that nothing needs any more.

The sweep prunes runs that are done for long enough (`retention` in temporal.yaml), `ratchet admin prune` the runs that
it is given. Rows are moved in parts of about 64 MiB. A part is one transaction, which locks the run's row and reads one
snapshot: its files and its deletion cover the same rows.

| the process dies                                   | what exists                 | what the next prune does      |
|----------------------------------------------------|-----------------------------|-------------------------------|
| before `pruned_at` is committed                    | the run as it was           | begins                        |
| after it                                           | the run, not resumable      | writes the first part         |
| while a part is read and written                   | rows, `*.partial` files     | writes the part again         |
| after files of the part have their names           | rows, files                 | replaces the files by equal ones |
| after the rows are dropped, before the commit      | rows, files                 | the same                      |
| after the commit                                   | files, a higher `archived_to` | writes the next part        |
| before `archived_at` is committed                  | files                       | finds no rollout, writes it   |
| after weights are retired, before they are deleted | rows `retired`, directories | deletes the directories       |

In the store stay: runs, steps, metrics, tasks, groups, rollouts with rewards, patches, verdicts without their logs,
attempts without their transcripts, and boxes. Of the files stay the newest checkpoint, the newest and the initial
weights, and weights that another run was started from. Logs of parts are rotated by the supervisor, the output of boxes
goes with the box, and histories expire after `retention_days` in a Temporal namespace of our own.
"""

import asyncio
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from engine import weight_storage
from ratchet import paths
from ratchet.errors import WeightStorageError
from ratchet.stored_config import read_stored_config
from ratchet.temporal_settings import Retention
from store import retention, runs
from store.database import Database

_LOG = structlog.get_logger()
_PAGE_ROLLOUTS = 8
_PART_BYTES = 64 << 20


@dataclass(slots=True, frozen=True)
class PruneTask:
    """The parts of a run to prune: its turns and logs, its weights and checkpoints, or both."""

    run_id: str
    turns: bool = True
    weights: bool = True


@dataclass(slots=True, frozen=True)
class Pruned:
    """The amount of a run's data that was pruned, or would be."""

    run_id: str
    num_rollouts: int
    num_directories: int


async def due_tasks(database: Database, settings: Retention) -> list[PruneTask]:
    """Return what the settings allow to prune now, the runs that ended first at the front."""
    async with database.begin() as connection:
        turns = await retention.runs_to_archive(connection, settings.turns_days)
        ended = await retention.runs_without_use_of_weights(connection, settings.weights_days)
    weights = {
        run.run_id
        for run in ended
        if any((directory / run.run_id).is_dir() for directory in (paths.policies(), paths.checkpoints()))
        and (run.is_pruned or read_stored_config(run.config).training.kept_versions is not None)
    }
    names = dict.fromkeys([*turns, *(run.run_id for run in ended)])
    tasks = [PruneTask(run_id, run_id in turns, run_id in weights) for run_id in names]
    return [task for task in tasks if task.turns or task.weights]


async def describe_prune(database: Database, task: PruneTask, force: bool = False) -> Pruned:
    """Return what `prune_run` would do. Raises ConfigError if the run may not be pruned."""
    num_rollouts = 0
    if task.turns:
        async with database.begin() as connection:
            await retention.may_prune(connection, task.run_id, force)
            num_rollouts = await retention.count_rollouts_to_archive(connection, task.run_id)
    unused = await _unused_directories(database, task.run_id) if task.weights else []
    return Pruned(task.run_id, num_rollouts, len(unused))


async def prune_run(database: Database, task: PruneTask, force: bool = False, max_seconds: float = math.inf) -> Pruned:
    """Prune a run; a later call goes on where `max_seconds` ended it. ConfigError if it may not be pruned."""
    end = time.monotonic() + max_seconds
    num_rollouts = 0
    if task.turns:
        await database.run(retention.begin_prune, task.run_id, force)
        while time.monotonic() < end and (moved := await archive_next_part(database, task.run_id)) is not None:
            num_rollouts += moved
    return Pruned(task.run_id, num_rollouts, await _delete_weights(database, task.run_id) if task.weights else 0)


async def archive_next_part(database: Database, run_id: str, part_bytes: int = _PART_BYTES) -> int | None:
    """Move the next rollouts' rows of a run, about `part_bytes` of them; return how many rollouts, None at the end.
    `begin_prune` comes first. Raises FencedError or StoreUnavailableError if another process moves the same rows."""
    from activities.turn_archive import ArchivePart, remove_partial_files  # loads pyarrow

    async with database.begin() as connection:
        after = await retention.begin_part(connection, run_id)
        last, size, num_rollouts = after, 0, 0
        page = await retention.next_rollouts(connection, run_id, after, _PAGE_ROLLOUTS)
        if not page:
            await retention.end_archive(connection, run_id)
            remove_partial_files(paths.archive() / run_id)
            return None
        with ArchivePart(paths.archive() / run_id, after) as part:
            while page and size < part_bytes:
                for table in retention.ARCHIVED_TABLES:
                    rows = await retention.rows_to_archive(connection, table, page)
                    size += await asyncio.to_thread(part.add, table, rows)
                last, num_rollouts = page[-1], num_rollouts + len(page)
                page = await retention.next_rollouts(connection, run_id, last, _PAGE_ROLLOUTS)
            await asyncio.to_thread(part.finish)
        await retention.drop_archived_rows(connection, run_id, after, last)
    _LOG.info("turns archived", run=run_id, rollouts=num_rollouts, bytes=size)
    return num_rollouts


async def _delete_weights(database: Database, run_id: str) -> int:
    await database.run(retention.retire_weights, run_id)
    unused = await _unused_directories(database, run_id)
    for path in unused:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
    await _delete_stored_weights(database, run_id)
    return len(unused)


async def _delete_stored_weights(database: Database, run_id: str) -> None:
    """Delete what nothing needs at the run's address. If it is unavailable, the next prune does it."""
    async with database.begin() as connection:
        row = await runs.get_run(connection, run_id)
        kept = await retention.kept_files(connection, run_id)
    address = None if row is None else read_stored_config(row.config).training.weights_address
    if address is None or not kept.stored:
        return
    try:
        for name in await asyncio.to_thread(weight_storage.list_versions, address, run_id):
            if name not in kept.stored:
                uri = weight_storage.version_address(address, f"{run_id}/{name}")
                await asyncio.to_thread(weight_storage.delete_version, uri)
    except WeightStorageError as error:
        _LOG.warning("weights not deleted", run=run_id, reason=str(error))


async def _unused_directories(database: Database, run_id: str) -> list[Path]:
    """Return the directories of weights and checkpoints of an ended run that nothing needs."""
    kept = await database.run(retention.kept_files, run_id)
    return [
        *_subdirectories(paths.policies() / run_id, kept.versions),
        *_subdirectories(paths.checkpoints() / run_id, kept.checkpoints),
    ]


def _subdirectories(directory: Path, kept: set[str]) -> list[Path]:
    """Return the subdirectories without those in `kept`; none if `kept` is empty, because then nothing is known."""
    if not kept or not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if path.is_dir() and path.name not in kept]
