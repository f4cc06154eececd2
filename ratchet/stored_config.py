"""The config that a run's row holds: read it under a later version, and recognise a run by the digest of its config."""

import hashlib
from typing import Any

import orjson

from ratchet.config import RunConfig
from ratchet.types import JsonObject

_CHANGED_DEFAULTS = (("sandbox", "adaptive", (False, True)), ("grading", "admission", ("required", "optional")))
"""Section, key, and its defaults in version 0.1.0 and now."""


def read_stored_config(values: JsonObject) -> RunConfig:
    """Return the config of a run's row. Keys that this version does not know are ignored."""
    return RunConfig.model_validate(values, extra="ignore")


def config_digest(config: RunConfig) -> str:
    """Return the sha256 of the values that differ from their defaults; runs with equal digests do the same work.

    Defaults are left out, so that a new key does not make a run's config another one in the middle of the run. So is
    the placement on machines and GPUs: a run goes on with other engines.
    """
    return _digest(_changed_values(config))


def known_digests(config: RunConfig) -> set[str]:
    """Return the digests that a run with this config may have: versions with other defaults left out other values."""
    found = [_changed_values(config)]
    for section, name, defaults in _CHANGED_DEFAULTS:
        value = getattr(getattr(config, section), name)
        if value in defaults:
            found += [_with_value(values, section, name, value) for values in found]
            found += [_with_value(values, section, name, None) for values in found]
    return {_digest(values) for values in found}


def _with_value(values: JsonObject, section: str, name: str, value: Any) -> JsonObject:
    """Return a copy with this value, or without one."""
    changed = {key: kept for key, kept in values.get(section, {}).items() if key != name}
    changed |= {} if value is None else {name: value}
    others = {key: kept for key, kept in values.items() if key != section}
    return others | ({section: changed} if changed else {})


def _changed_values(config: RunConfig) -> JsonObject:
    values = config.model_dump(mode="json", exclude_defaults=True, exclude={"engines": True, "training": {"gpus"}})
    if not values.get("training", True):
        del values["training"]
    return values


def _digest(values: JsonObject) -> str:
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()
