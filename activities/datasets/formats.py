"""Which reader a path needs, and a dataset's identity.

Why here: whoever has a path should not care how it is written.
Called by: `activities/run_lifecycle.py`, `activities/dataset_import.py` and `ratchet tasks`.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from activities.datasets import harbor, jsonl, parquet
from activities.datasets.base import Problem, Raw, checked_rows, rows_of
from ratchet.config import DatasetConfig
from ratchet.errors import DatasetError

_CHUNK_BYTES = 1 << 20


def _raws(path: Path, dataset: DatasetConfig) -> Iterator[Raw | Problem]:
    if path.is_dir():
        return harbor.read_harbor(path, dataset)
    if path.suffix in (".parquet", ".pq"):
        return parquet.read_parquet(path, dataset)
    return jsonl.read_jsonl(path, dataset)


def read_rows(dataset: DatasetConfig, digest: str) -> Iterator[dict[str, Any]]:
    """Rows for the store's `task` table; raises DatasetError at the first that cannot be used."""
    return rows_of(_raws(Path(dataset.path), dataset), dataset, digest)


def check_rows(dataset: DatasetConfig) -> Iterator[dict[str, Any] | Problem]:
    """Every row, or what is wrong with it."""
    return checked_rows(_raws(Path(dataset.path), dataset), dataset, "")


def dataset_digest(dataset: DatasetConfig) -> str:
    """Of the content and of how its columns are read."""
    path = Path(dataset.path)
    if not path.exists():
        raise DatasetError(f"{path}: does not exist; name a JSONL or parquet file, or a folder of Harbor tasks")
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            if path.is_dir():
                digest.update(f"\0{file.relative_to(path)}\0".encode())
            with file.open("rb") as content:
                while chunk := content.read(_CHUNK_BYTES):
                    digest.update(chunk)
    keys = f"{dataset.input_key}\0{dataset.label_key}\0{dataset.metadata_key}"
    return hashlib.sha256(f"{digest.hexdigest()}\0{keys}".encode()).hexdigest()
