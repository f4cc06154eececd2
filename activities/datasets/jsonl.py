"""Dataset format: JSONL, one task per line, which may also be an unchanged row of SWE-bench (`swe_rows.py`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from activities.datasets.base import Problem, RawRow
from activities.datasets.swe_rows import is_swe_row, translate_swe_row
from ratchet.config import DatasetConfig


def read_jsonl(path: Path, dataset: DatasetConfig) -> Iterator[RawRow | Problem]:
    """Yield one row per line; empty lines are none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    value = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    yield Problem(str(path), number, "", f"is not JSON: {error}")
                else:
                    yield from_object(value, number, str(path), dataset)


def from_object(value: Any, number: int, file: str, dataset: DatasetConfig) -> RawRow | Problem:
    """Return the row of a JSON object, or its problem; `file` is for messages."""
    if not isinstance(value, dict):
        return Problem(file, number, "", f"expected an object, found {type(value).__name__}")
    if dataset.metadata_key not in value and is_swe_row(value):
        return translate_swe_row(value, number, file)
    return RawRow(
        number, value.get(dataset.label_key), value.get(dataset.input_key), value.get(dataset.metadata_key), file
    )
