"""Dataset format: parquet with JSONL's keys as columns, read in batches. `metadata` may be a struct or JSON text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from activities.datasets.base import Problem, RawRow
from activities.datasets.jsonl import from_object
from ratchet.config import DatasetConfig
from ratchet.storable_values import find_unstorable

_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20


def read_parquet(path: Path, dataset: DatasetConfig) -> Iterator[RawRow | Problem]:
    """Yield one row per row of the file."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pyarrow.ArrowInvalid, OSError) as error:
        yield Problem(str(path), 0, "", f"is not a parquet file: {error}")
        return
    number = 0
    with file:
        for group in range(file.num_row_groups):  # given all groups at once, the library reads far ahead
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], use_threads=False):
                for value in batch.to_pylist():
                    number += 1
                    yield from_object(_plain(value, dataset.metadata_key), number, str(path), dataset)


def _plain(value: dict[str, Any], metadata_key: str) -> dict[str, Any]:
    """Parse metadata that is JSON text, and drop the null fields of a struct, which parquet fills in. What cannot be
    stored, perhaps because it is too deep, stays as it is: the row is refused later."""
    metadata = value.get(metadata_key)
    if isinstance(metadata, str):
        try:
            metadata = orjson.loads(metadata)
        except orjson.JSONDecodeError:
            return value
    if isinstance(metadata, dict):
        known = metadata if find_unstorable(metadata) else _without_nulls(metadata)
        return {**value, metadata_key: known}
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return value
