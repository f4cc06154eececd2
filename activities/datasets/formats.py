"""Choose the reader for a dataset's path, and compute the dataset's digest."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from activities.datasets import harbor, jsonl, parquet
from activities.datasets.base import Problem, RawRow, checked_rows, rows_of
from ratchet.config import DatasetConfig
from ratchet.errors import DatasetError
from store.tasks import NewTask

_CHUNK_BYTES = 1 << 20


def _read_raw_rows(path: Path, dataset: DatasetConfig) -> Iterator[RawRow | Problem]:
    if path.is_dir():
        return harbor.read_harbor(path, dataset)
    if path.suffix in (".parquet", ".pq"):
        return parquet.read_parquet(path, dataset)
    return jsonl.read_jsonl(path, dataset)


def read_rows(dataset: DatasetConfig, digest: str) -> Iterator[NewTask]:
    """Yield rows for the store's `task` table. Raises DatasetError at the first row that cannot be used."""
    return rows_of(_read_raw_rows(Path(dataset.path), dataset), dataset, digest)


def check_rows(dataset: DatasetConfig) -> Iterator[NewTask | Problem]:
    """Yield every row, or its problem."""
    return checked_rows(_read_raw_rows(Path(dataset.path), dataset), dataset, "")


def dataset_digest(dataset: DatasetConfig) -> str:
    """Return the sha256 of the content and the column names. Raises DatasetError if the path does not exist."""
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
