"""The config that a run's row holds: read it under a later version, and recognise a run by the digest of its config."""

import copy
import hashlib
from typing import Any

import orjson
from pydantic import ValidationError

from ratchet.config import MetricsConfig, RunConfig
from ratchet.config_engines import DEFAULT_SET
from ratchet.types import JsonObject

_CHANGED_DEFAULTS = {"dtype": ("auto", "float32"), "activation_checkpointing": (None, False)}
"""Key of `training` -> its default, and the one that it had before."""
_ADDED_KEYS = {
    "engine": ("images", "lora_runs", "restore_reasoning", "stop_token_ids"),
    "sandbox": ("adaptive",),
    "loss": ("chain_credit", "distillation", "reference_kl", "reference_model", "reward_factor", "teacher_model"),
    "training": (
        "expert_parallel",
        "full_weights_every",
        "fused_kernels",
        "lora",
        "max_skipped_steps",
        "router_replay",
        "sequence_parallel",
        "shard_ranks",
        "weights_address",
    ),
    "evaluation": ("every",),
    "grading": ("control_share",),
}
"""Section -> keys that it did not have when digests covered the defaults."""


def read_stored_config(values: JsonObject) -> RunConfig:
    """Return the config of a run's row. Keys of other versions of this program are ignored, and numbers above a bound
    that earlier versions did not have are read as the bound."""
    try:
        return RunConfig.model_validate(values, extra="ignore")
    except ValidationError as error:
        return RunConfig.model_validate(_within_bounds(values, error), extra="ignore")


def _within_bounds(values: JsonObject, error: ValidationError) -> JsonObject:
    """Return the values with those that are too large for their keys replaced by the largest that is accepted."""
    bounded: Any = copy.deepcopy(values)
    for mistake in error.errors():
        if mistake["type"] == "less_than_equal":
            *parents, leaf = mistake["loc"]
            section = bounded
            for part in parents:
                section = section[part]
            section[leaf] = mistake["ctx"]["le"]
    checked: JsonObject = bounded
    return checked


def config_digest(config: RunConfig) -> str:
    """Return the sha256 of the values that differ from their defaults; runs with equal digests do the same work.

    Defaults are left out, so that a new key does not make a run's config another one in the middle of the run. So is
    the placement on machines and GPUs: a run goes on with other engines.
    """
    values = config.model_dump(mode="json", exclude_defaults=True)
    _drop_placement(values)
    return _digest(values)


def known_digests(config: RunConfig) -> list[str]:
    """Return the digests under which an open run with this config may be stored: today's and the earlier ones.

    Until migration 0002 the digest covered the defaults, too, of the keys that there were. Later the defaults of two
    keys were changed to those that mean the same on a CPU.
    """
    values = config.model_dump(mode="json")
    _drop_placement(values)
    for section, keys in _ADDED_KEYS.items():
        fields = type(getattr(config, section)).model_fields
        for key in keys:
            if getattr(getattr(config, section), key) == fields[key].default:
                del values[section][key]
    if config.metrics == MetricsConfig():
        del values["metrics"]
    if config.endpoint is None:
        del values["endpoint"]
    if config.engine_set == DEFAULT_SET:
        del values["engine_set"]
    for dataset in values["datasets"]:
        if dataset["weight"] is None:
            del dataset["weight"]
    training = values["training"]
    for key, (now, then) in _CHANGED_DEFAULTS.items():
        training[key] = then if training[key] == now else training[key]
    return [config_digest(config), _digest(_without_changed_defaults(config)), _digest(values)]


def _without_changed_defaults(config: RunConfig) -> JsonObject:
    """Return the values that differ from the defaults which the keys had before."""
    values = config.model_dump(mode="json", exclude_defaults=True)
    _drop_placement(values)
    training = dict(values.get("training", {}))
    for key, (_, then) in _CHANGED_DEFAULTS.items():
        if key in training and training[key] == then:
            del training[key]
    left = {name: value for name, value in values.items() if name != "training"}
    return left | ({"training": training} if training else {})


def _drop_placement(values: JsonObject) -> None:
    values.pop("engines", None)
    training = values.get("training", {})
    if training.pop("gpus", None) is not None and not training:
        del values["training"]


def _digest(values: JsonObject) -> str:
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()
