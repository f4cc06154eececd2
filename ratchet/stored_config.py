"""The config that a run's row holds: read it under a later version, and recognise a run by the digest of its config."""

import hashlib

import orjson

from ratchet.config import MetricsConfig, RunConfig
from ratchet.types import JsonObject


def read_stored_config(values: JsonObject) -> RunConfig:
    """Return the config of a run's row. Keys of other versions of this program are ignored."""
    return RunConfig.model_validate(values, extra="ignore")


def config_digest(config: RunConfig) -> str:
    """Return the sha256 of the values that differ from their defaults; runs with equal digests do the same work.

    Defaults are left out, so that a new key does not make a run's config another one in the middle of the run.
    """
    return _digest(config.model_dump(mode="json", exclude_defaults=True))


def known_digests(config: RunConfig) -> list[str]:
    """Return the digests under which an open run with this config may be stored: today's and the earlier one.

    Until migration 0002 the digest covered the defaults, too, of the keys that there were.
    """
    values = config.model_dump(mode="json")
    if config.grading.control_share == 1:
        del values["grading"]["control_share"]
    for key, default in (("images", "placeholder"), ("restore_reasoning", None)):
        if values["engine"][key] == default:
            del values["engine"][key]
    if not config.sandbox.adaptive:
        del values["sandbox"]["adaptive"]
    if config.metrics == MetricsConfig():
        del values["metrics"]
    if config.endpoint is None:
        del values["endpoint"]
    if config.evaluation.every is None:
        del values["evaluation"]["every"]
    for dataset in values["datasets"]:
        if dataset["weight"] is None:
            del dataset["weight"]
    return [config_digest(config), _digest(values)]


def _digest(values: JsonObject) -> str:
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()
