"""Rows of the store as Arrow tables: arrays are bytes as in the store (`store.arrays`), JSON is text."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from sqlalchemy import BigInteger, Boolean, DateTime, Float, Integer, LargeBinary, Text
from sqlalchemy.dialects.postgresql import JSONB

_ARROW: dict[type[Any], Any] = {
    BigInteger: pa.int64(),
    Integer: pa.int32(),
    Text: pa.large_string(),
    LargeBinary: pa.large_binary(),
    DateTime: pa.timestamp("us", tz="UTC"),
    Boolean: pa.bool_(),
    Float: pa.float64(),
    JSONB: pa.large_string(),
}


def arrow_table(columns: Iterable[Any], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows of these columns of the store's tables. Without rows the table has its columns all the same."""
    kinds = {column.name: type(column.type) for column in columns}
    values = {
        name: [json.dumps(row[name]) if kind is JSONB and row[name] is not None else row[name] for row in rows]
        for name, kind in kinds.items()
    }
    return pa.table(values, schema=pa.schema([(name, _ARROW[kind]) for name, kind in kinds.items()]))
