"""Dataset format: JSONL, one task a line, read without holding the file in memory.

Why here: our own format; a line may also be a SWE-bench or SWE-bench Pro row as it stands (`swe_rows.py`).
Called by: `activities/datasets/formats.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from activities.datasets.base import Problem, Raw
from activities.datasets.swe_rows import is_foreign, translated
from ratchet.config import DatasetConfig


def read_jsonl(path: Path, dataset: DatasetConfig) -> Iterator[Raw | Problem]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _line(line, number, path, dataset)


def _line(line: bytes, number: int, path: Path, dataset: DatasetConfig) -> Raw | Problem:
    if not line.strip():
        return Problem(str(path), number, "", "expected a JSON object, found an empty line")
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return Problem(str(path), number, "", f"is no JSON: {error}")
    return from_object(value, number, str(path), dataset)


def from_object(value: Any, number: int, file: str, dataset: DatasetConfig) -> Raw | Problem:
    """One row of any file format whose rows are objects."""
    if not isinstance(value, dict):
        return Problem(file, number, "", f"expected an object, found {type(value).__name__}")
    if dataset.metadata_key not in value and is_foreign(value):
        return translated(value, number, file)
    return Raw(
        number, value.get(dataset.label_key), value.get(dataset.input_key), value.get(dataset.metadata_key), file
    )
