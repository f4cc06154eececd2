"""Read a run's config from the file, the environment and the command line, and explain wrong values.

`config.py` declares the settings; this module finds their values.

Precedence: `--set a.b=c` > arguments of vime > `RATCHET_A__B` > variables of vime > the YAML file > the defaults.
"""

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ratchet import secrets
from ratchet.config import TINY_POLICIES, RunConfig
from ratchet.errors import ConfigError
from ratchet.suggestions import config_keys, did_you_mean
from ratchet.vime_names import (
    EXTRA_ENVS_VARIABLE,
    OTHER_VLLM,
    TRAIN_DATASETS,
    VIME_VARIABLES,
    VLLM_ARGS,
    Setting,
    settings_of_arguments,
    settings_of_vllm_args,
    value_of,
)
from ratchet.yaml_text import NOT_YAML, parse_yaml, read_yaml, why_unreadable

_OTHER_DISTRIBUTIONS = (
    "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
)  # fmt: skip
_DISTRIBUTION_ARGUMENTS = ("--logits-processors", "--logprobs-mode", "--logits_processors", "--logprobs_mode")
_NOT_RENORMALISED = (
    "it would sample from another distribution than the one that training computes, because the tokens that it "
    "excludes or reweights are not stored; set sampling.temperature alone"
)


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{dotted}: {key} is not a section; `ratchet admin config FILE` prints the keys")
    tree[leaf] = value


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = (
            _merge(merged[key], value) if isinstance(value, Mapping) and isinstance(merged.get(key), dict) else value
        )
    return merged


def _from_variables(environment: Mapping[str, str], harness: str | None) -> list[Setting]:
    """Return what vime's variables set for runs of this harness."""
    found: list[Setting] = []
    for variable in VIME_VARIABLES:
        text = value_of(variable.name, environment)
        if text is None or variable.key is None or variable.harness not in (None, harness):
            continue
        if variable.name == VLLM_ARGS:
            found += settings_of_vllm_args(text)
            continue
        value = text if variable.is_text else _parsed(variable.name, text)
        if variable.name == EXTRA_ENVS_VARIABLE and isinstance(value, dict):
            value = {key: f"${{{key}}}" for key in value}  # the workers find the values where this process did
        found.append(Setting(variable.name, variable.key, value))
    return found


def _apply(tree: dict[str, Any], settings: Sequence[Setting]) -> None:
    """Set keys in the tree of a config. A path of training tasks takes the place of all training datasets."""
    for name, key, value in settings:
        if key == OTHER_VLLM:
            engine = tree.setdefault("engine", {})
            engine["args"] = [*(engine.get("args") or []), *value]
        elif key.startswith(TRAIN_DATASETS):
            tree["datasets"] = _with_dataset_key(name, key.removeprefix(f"{TRAIN_DATASETS}."), value, tree)
        else:
            _put(tree, key, value)


def _with_dataset_key(name: str, key: str, value: Any, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    datasets = [dict(one) for one in tree.get("datasets") or []]
    trained = [one for one in datasets if one.get("use", "train") == "train"]
    if key == "path":
        return [{**(trained[0] if trained else {}), "path": value}, *(one for one in datasets if one not in trained)]
    if not trained:
        raise ConfigError(f"{name}: the config has no training dataset; name its file by --prompt-data")
    return [{**one, key: value} if one in trained else one for one in datasets]


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    sections = {name for name in RunConfig.model_fields if name not in {"model", "seed", "drift", "init_from"}}
    for name, text in sorted(environment.items()):
        dotted = name.removeprefix("RATCHET_").lower().replace("__", ".")
        if name.startswith("RATCHET_") and (
            dotted in RunConfig.model_fields or (dotted.split(".")[0] in sections and "." in dotted)
        ):
            _put(tree, dotted, _yaml_or_text(text))
    return tree


def _yaml_or_text(text: str) -> Any:
    """Parse one value as YAML; other text is kept, such as a prompt that begins with `{problem_statement}`."""
    try:
        return parse_yaml(text)
    except NOT_YAML:
        return text


def _parsed(name: str, text: str) -> Any:
    """Parse a variable as YAML; the values of an object become text. Raises ConfigError."""
    try:
        value = parse_yaml(text)
    except NOT_YAML as error:
        if name == EXTRA_ENVS_VARIABLE:
            raise ConfigError(f"{name} is not a JSON object") from None
        raise ConfigError(f"{name}: {text[:80]!r} cannot be read: {why_unreadable(error)}") from None
    return {key: str(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def dotted_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return dotted key → value for texts KEY=VALUE, of which each value is YAML. Raises ConfigError."""
    values = {}
    for override in overrides:
        dotted, separator, text = override.partition("=")
        if not separator or not dotted:
            raise ConfigError(f"{override!r}: expected KEY=VALUE, for example training.max_staleness=2")
        values[dotted] = _yaml_or_text(text)
    return values


def explain_validation(error: ValidationError, source: str, model: type[BaseModel] = RunConfig) -> ConfigError:
    """Return an error with one sentence per mistake of a `model`: the key, the value, what was expected."""
    problems = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            name = ".".join(str(part) for part in item["loc"] if isinstance(part, str))
            is_sampling = name.removeprefix("sampling.") in _OTHER_DISTRIBUTIONS
            hint = f": {_NOT_RENORMALISED}" if is_sampling else did_you_mean(name, config_keys(model))
            problems.append(f"{key}: there is no such key{hint}")
        elif item["type"] == "missing":
            problems.append(f"{key}: missing")
        elif not item["loc"]:
            problems.append(item["msg"].removeprefix("Value error, "))
        else:
            got = "" if "extra_env" in item["loc"] else f" (got {item['input']!r:.80})"
            problems.append(f"{key}: {item['msg'].removeprefix('Value error, ')}{got}")
    return ConfigError(f"{source}: " + "; ".join(problems))


def resolve_config(values: Mapping[str, Any], source: str, base: Path) -> RunConfig:
    """Validate `values` and make every path absolute. Raises ConfigError naming key, value and expectation."""
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise explain_validation(error, source) from None
    for argument in config.engine.args:
        if argument.partition("=")[0] in _DISTRIBUTION_ARGUMENTS:
            raise ConfigError(f"{source}: engine.args: {argument} is refused: {_NOT_RENORMALISED}")
    for name, value in config.harness.extra_env.items():
        secrets.require_reference(f"{source}: harness.extra_env.{name}", name, value)
    if config.endpoint is not None and config.endpoint.key is not None:
        secrets.require_reference(f"{source}: endpoint.key", "NAME", config.endpoint.key)

    def absolute(path: str) -> str:
        expanded = Path(path).expanduser()
        if expanded.is_absolute():
            return str(expanded)
        beside = (base / expanded).resolve()
        return str(beside if beside.exists() else expanded.resolve())

    datasets = [dataset.model_copy(update={"path": absolute(dataset.path)}) for dataset in config.datasets]
    for dataset in datasets:
        if config.evaluation.forked_turn_id is None and not Path(dataset.path).exists():
            raise ConfigError(
                f"{source}: datasets: {dataset.path} does not exist; "
                "name a JSONL or parquet file, or a folder of Harbor tasks"
            )
    model = config.model if config.model in TINY_POLICIES else absolute(config.model)
    init_from = config.init_from if config.init_from is None or "@" in config.init_from else absolute(config.init_from)
    reference = config.loss.reference_model if config.loss.reference_kl else None  # otherwise it is not read
    teacher = config.loss.teacher_model if config.loss.distillation else None
    frozen = {"reference_model": reference, "teacher_model": teacher}
    loss = config.loss.model_copy(update={key: path and absolute(path) for key, path in frozen.items()})
    return config.model_copy(update={"datasets": datasets, "model": model, "init_from": init_from, "loss": loss})


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> RunConfig:
    """Read the run's config from all six sources. `arguments`: those of `ratchet train`. Raises ConfigError."""
    from_file = read_yaml(path, "; name a YAML file, for example configs/quickstart.yaml") or {}
    if not isinstance(from_file, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, found {type(from_file).__name__}")
    environment = os.environ if environment is None else environment

    def merged(harness: str | None) -> dict[str, Any]:
        tree = copy.deepcopy(from_file)
        _apply(tree, _from_variables(environment, harness))
        tree = _merge(tree, _from_environment(environment))
        _apply(tree, [_with_value(one) for one in settings_of_arguments(arguments)])
        own: dict[str, Any] = {}
        for dotted, value in dotted_values(overrides).items():
            _put(own, dotted, value)
        return _merge(tree, own)

    harness = merged(None).get("harness")
    name = harness.get("name") if isinstance(harness, dict) else None
    return resolve_config(merged(name), str(path), path.resolve().parent)


def _with_value(one: Setting) -> Setting:
    """Parse an argument's text as YAML; what is passed to vLLM stays text."""
    if one.key == OTHER_VLLM:
        return one
    texts = one.value
    parsed = [_yaml_or_text(text) for text in texts] if isinstance(texts, list) else _yaml_or_text(texts)
    return one._replace(value=parsed)
