"""Values that are never stored: a config holds `${NAME}`, and the worker that needs the value looks it up.

Configs are rows in Postgres and arguments in Temporal's histories, which many people can read. A name is looked up in
`secrets.env` of the state directory (lines NAME=value), then in the object that VIME_AGENT_CC_EXTRA_ENVS holds, then in
the worker's environment.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from ratchet import paths
from ratchet.errors import ConfigError
from ratchet.types import JsonObject
from ratchet.vime_names import EXTRA_ENVS_VARIABLE, value_of
from ratchet.yaml_text import NOT_YAML

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
MIN_SECRET_CHARS = 6
"""Shorter values are not replaced in messages: they would match by chance."""

_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)S?$")
_MIN_VARIABLE_CHARS = 12
"""Shorter values of variables are no keys of a service; a password such as `postgres` is a word of many messages."""
# Bounded, so that a long text without a URL costs no more than its length.
_URL_PASSWORD = re.compile(r"(?<!\w)(\w{1,20}://[^\s:/@]{0,200}):[^\s@/]{1,1000}@")
_BEARER = re.compile(r"\b(bearer )[^\s'\"]+", re.IGNORECASE)

_used: set[str] = set()


def require_reference(key: str, name: str, value: str) -> None:
    """Raise ConfigError for a value that is written out, without it. `name`: that of a reference, for the message."""
    if not _REFERENCE.fullmatch(value):
        raise ConfigError(
            f"{key}: configs are stored in Postgres and in Temporal's histories, so write ${{{name}}} here, "
            f"and the value as {name}=… into {paths.home() / 'secrets.env'} or the workers' environment "
            "(`ratchet resume` continues a run that was started with the value)"
        )


def resolve_references(key: str, value: Any) -> Any:
    """Return a config's value with every reference in its texts, also within lists and mappings, replaced by its value.

    A text without a reference, in the config of a run that began before references were required, stays as it is.
    Raises ConfigError for a name without a value. `key`: of the config, for the message.
    """
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: _value(key, match[1]), value)
    if isinstance(value, Mapping):
        return {name: resolve_references(f"{key}.{name}", one) for name, one in value.items()}
    return [resolve_references(key, one) for one in value] if isinstance(value, list) else value


def redact_config(config: JsonObject) -> JsonObject:
    """Return a stored config as people and other services may see it.

    `***` is for values of `harness.extra_env` that are written out: the run began before references were required.
    """
    harness = config.get("harness") or {}
    if not harness.get("extra_env"):
        return config
    shown = {name: text if _REFERENCE.fullmatch(text) else "***" for name, text in harness["extra_env"].items()}
    return {**config, "harness": {**harness, "extra_env": shown}}


def _value(key: str, name: str) -> str:
    for source in (_from_file(), _from_extra_envs(), os.environ):
        if name in source:
            if len(source[name]) >= MIN_SECRET_CHARS:
                _used.add(source[name])
            return source[name]
    raise ConfigError(
        f"{key}: ${{{name}}} has no value; write {name}=… into {paths.home() / 'secrets.env'}, "
        "or set it in the workers' environment"
    )


def note_values(values: Mapping[str, str]) -> None:
    """Look the references up only so that `without_secrets` knows their values; those without a value are left out."""
    for text in values.values():
        with contextlib.suppress(ConfigError):
            resolve_references("", text)


def note_environment() -> None:
    """Make `without_secrets` replace the values of variables whose names end with KEY, TOKEN, SECRET or PASSWORD."""
    found = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)}
    _used.update(value for value in found if len(value) >= _MIN_VARIABLE_CHARS)


def without_secrets(text: str) -> str:
    """Return the text without passwords of URLs, and with `***` for bearer tokens and every value that this process has
    looked up. Shorten a text after this call: a part of a secret is not found."""
    for value in sorted(_used, key=len, reverse=True):
        text = text.replace(value, "***")
    return _BEARER.sub(r"\1***", _URL_PASSWORD.sub(r"\1@", text))


def _from_file() -> dict[str, str]:
    try:
        lines = (paths.home() / "secrets.env").read_text("utf-8-sig", "surrogateescape").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _from_extra_envs() -> dict[str, str]:
    try:
        values = yaml.safe_load(value_of(EXTRA_ENVS_VARIABLE) or "{}")
    except NOT_YAML:
        return {}
    return {str(name): str(value) for name, value in values.items()} if isinstance(values, dict) else {}
