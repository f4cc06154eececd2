"""Write rows of ended rollouts to Parquet files, one directory per run and table.

`archive/<run_id>/<table>/<after>.parquet` has the rows of the rollouts that follow the id `after`. A file appears by a
rename, after its contents are on disk. Arrays are bytes as in the store (`store.arrays`), JSON is text.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import pyarrow.parquet as pq

from engine.policy_files import fsync
from store.parquet_tables import arrow_table
from store.retention import ARCHIVED_TABLES


class ArchivePart:
    """The files of one part of a run's archive, one per table, written page by page."""

    def __init__(self, directory: Path, after: int) -> None:
        """`directory`: of the run. `after`: id of the last rollout that earlier parts have."""
        self._paths = {name: directory / name / f"{after:012}.parquet" for name in ARCHIVED_TABLES}
        # Names of its own, because another process may write the same part.
        self._partial = {name: path.with_suffix(f".{uuid4().hex[:8]}.partial") for name, path in self._paths.items()}
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for name, path in self._partial.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            schema = arrow_table(ARCHIVED_TABLES[name].__table__.columns, []).schema
            self._writers[name] = pq.ParquetWriter(path, schema, compression="zstd")
        return self

    def __exit__(self, *_: object) -> None:
        for writer in list(self._writers.values()):
            with contextlib.suppress(OSError):
                writer.close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)

    def add(self, name: str, rows: Sequence[Mapping[str, Any]]) -> int:
        """Append rows of a table; return their size in bytes."""
        if not rows:
            return 0
        batch = arrow_table(ARCHIVED_TABLES[name].__table__.columns, rows)
        self._writers[name].write_table(batch)
        return int(batch.nbytes)

    def finish(self) -> None:
        """Give the files their names. They replace those of an interrupted earlier try, which had the same rows."""
        for name, path in self._paths.items():
            self._writers.pop(name).close()
            fsync(self._partial[name])
            self._partial[name].replace(path)
            fsync(path.parent)


def remove_partial_files(directory: Path) -> None:
    """Delete what processes that died have left of the archive of a run."""
    for path in directory.glob("*/*.partial"):
        path.unlink(missing_ok=True)
