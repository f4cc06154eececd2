"""Answers of bounded size for programs that read them into a context: pages of rows, pages of a text.

Each page has `next`: what to pass as `after` to get the page behind it, None on the last one.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import orjson

from ratchet.types import JsonObject

MAX_ANSWER_CHARS = 24_000
"""Size of one answer as JSON, about 6,000 tokens of a model."""
_MAX_TEXT_CHARS = 1_500
_MAX_ITEMS = 60
_MIN_TEXT_CHARS = 40
_ENTRIES_PER_ITEM = 4
"""An object may have so many times as many entries as a list has items: the metrics of a step are one object."""


def to_json(value: Any) -> Any:
    """Return dataclasses, times and numbers as JSON values; NaN and infinities as None, bytes by their number."""
    return orjson.loads(orjson.dumps(value, default=_other, option=orjson.OPT_NON_STR_KEYS))


def _other(value: Any) -> str:
    return f"({len(value)} bytes)" if isinstance(value, bytes | memoryview) else str(value)


def fit(value: Any, max_chars: int = MAX_ANSWER_CHARS) -> Any:
    """Return the value as JSON of at most about `max_chars`: long texts and lists are cut, and say by how much."""
    plain = to_json(value)
    text, items = _MAX_TEXT_CHARS, _MAX_ITEMS
    while True:
        cut = _cut(plain, text, items)
        if len(orjson.dumps(cut)) <= max_chars or text <= _MIN_TEXT_CHARS:
            return cut
        text //= 2
        items = max(4, items // 2)


def _cut(value: Any, text: int, items: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= text else f"{value[:text]} … ({len(value) - text} more characters)"
    if isinstance(value, list):
        more = [f"… ({len(value) - items} more)"] if len(value) > items else []
        return [*(_cut(one, text, items) for one in value[:items]), *more]
    if isinstance(value, dict):
        entries = items * _ENTRIES_PER_ITEM
        kept = {key: _cut(one, text, items) for key, one in list(value.items())[:entries]}
        return kept | ({"…": f"({len(value) - entries} more)"} if len(value) > entries else {})
    return value


def page_of_rows(rows: Sequence[Any], limit: int, cursor_of: Callable[[Any], int | str]) -> JsonObject:
    """Return the first rows, at most `limit` and at most an answer's size; `rows` has one more if there are more.

    `cursor_of`: what stands for a row in `next`.
    """
    kept: list[Any] = []
    size = 0
    for row in rows[:limit]:
        value = fit(row)
        size += len(orjson.dumps(value))
        if kept and size > MAX_ANSWER_CHARS:
            break
        kept.append(value)
    has_more = len(rows) > len(kept)
    return {"rows": kept, "next": cursor_of(rows[len(kept) - 1]) if kept and has_more else None}


def page_of_groups(rows: Sequence[Any], group_of: Callable[[Any], int], behind: int | None) -> JsonObject:
    """Return the first rows, at most an answer's size, so that a page ends with a whole group; its key is `next`.

    `behind`: `next` if all groups fit. If the first group alone does not fit, its last row says how many are missing.
    """
    kept: list[Any] = []
    size = 0
    end = behind
    for key, group in groupby(rows, group_of):
        values = [fit(row) for row in group]
        sizes = list(accumulate(len(orjson.dumps(value)) for value in values))
        if kept and size + sizes[-1] > MAX_ANSWER_CHARS:
            break
        fitting = sum(one <= MAX_ANSWER_CHARS for one in sizes) or 1
        kept += values[:fitting]
        if fitting < len(values):
            kept.append(f"… ({len(values) - fitting} more of {key})")
        size += sizes[-1]
        end = key
    else:
        end = behind
    return {"rows": kept, "next": end}


def page_of_text(text: str, after: int, **facts: Any) -> JsonObject:
    """Return the part of a text behind its first `after` characters, with facts about the whole."""
    part = text[after : after + MAX_ANSWER_CHARS]
    end = after + len(part)
    return {**to_json(facts), "num_chars": len(text), "text": part, "next": end if end < len(text) else None}


def without(value: Mapping[str, Any], *names: str) -> JsonObject:
    """Return the object without these fields."""
    return {name: one for name, one in value.items() if name not in names}
