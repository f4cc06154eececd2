"""The digest of a run's config: runs with equal digests do the same work."""

import hashlib
from typing import Any

import orjson

_LATER_KEYS: dict[tuple[str, str], Any] = {
    ("grading", "control_share"): 1,
    ("engine", "images"): "placeholder",
    ("engine", "restore_reasoning"): None,
}
"""Keys with their defaults that runs of earlier versions do not have, so that those go on after an upgrade."""


def config_digest(values: dict[str, Any]) -> str:
    """Return the sha256 of resolved values as JSON. `values` is changed."""
    for (section, key), default in _LATER_KEYS.items():
        if values[section][key] == default:
            del values[section][key]
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()
