"""The engines that a plan names, read from its file without the checks of a config, which take long to import."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.config_engines import DEFAULT_SET
from ratchet.types import JsonObject
from stack.placement import engine_name


@dataclass(slots=True, frozen=True)
class EnginePart:
    """The part of one engine, by its engine set and its number there, from 1."""

    name: str
    engine_set: str
    number: int


def planned_engines(path: Path, plan: JsonObject | None = None) -> dict[str, list[JsonObject]]:
    """Return engine set → its entries of `engines`, by `plan`, else by the file; one engine without either."""
    try:
        plan = json.loads(path.read_text()) if plan is None else plan
        found = {name: [dict(entry) for entry in served["config"]["engines"]] for name, served in plan["sets"].items()}
        engine_parts(found)  # the file may be damaged
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {DEFAULT_SET: [{"count": 1}]}


def engine_parts(entries: Mapping[str, Sequence[JsonObject]]) -> list[EnginePart]:
    return [
        EnginePart(engine_name(number, name), name, number)
        for name, served in entries.items()
        for number in range(1, 1 + sum(entry["count"] for entry in served))
    ]
