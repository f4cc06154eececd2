"""The config that a run's row holds: read it under a later version, and recognise a run by the digest of its config."""

import hashlib

import orjson

from ratchet.config import RunConfig
from ratchet.types import JsonObject


def read_stored_config(values: JsonObject) -> RunConfig:
    """Return the config of a run's row. Keys that this version does not know are ignored."""
    return RunConfig.model_validate(values, extra="ignore")


def config_digest(config: RunConfig) -> str:
    """Return the sha256 of the values that differ from their defaults; runs with equal digests do the same work.

    Defaults are left out, so that a new key does not make a run's config another one in the middle of the run. So is
    the placement on machines and GPUs: a run goes on with other engines.
    """
    values = config.model_dump(mode="json", exclude_defaults=True, exclude={"engines": True, "training": {"gpus"}})
    if not values.get("training", True):
        del values["training"]
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()
