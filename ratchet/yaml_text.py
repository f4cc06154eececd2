"""Read YAML that a person has written; everything that cannot be read is a ConfigError with one sentence."""

from pathlib import Path
from typing import Any

import yaml

from ratchet.errors import ConfigError

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""The errors that PyYAML raises for a text: ValueError for an impossible date or an integer of thousands of digits."""

_MERGE = "tag:yaml.org,2002:merge"


def parse_yaml(text: str) -> Any:
    """Parse a text. Raises one of NOT_YAML, also for a key that is given twice."""
    _require_single_keys(yaml.compose(text, yaml.SafeLoader))
    return yaml.safe_load(text)


def _require_single_keys(node: yaml.Node | None) -> None:
    """Raise ValueError if a mapping of the tree has a key twice: PyYAML would forget the first value.

    The tree is as it was written: merged keys (`<<`) are not in it yet.
    """
    nodes, seen = [node], set()
    while nodes:
        one = nodes.pop()
        if id(one) in seen:  # an alias, which may also contain itself
            continue
        seen.add(id(one))
        if isinstance(one, yaml.SequenceNode):
            nodes += one.value
        elif isinstance(one, yaml.MappingNode):
            nodes += [child for pair in one.value for child in pair]
            _require_each_once([key for key, _ in one.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE])


def _require_each_once(keys: list[yaml.ScalarNode]) -> None:
    marks: dict[tuple[str, str], yaml.Mark] = {}
    for key in keys:
        before = marks.setdefault((key.tag, key.value), key.start_mark)
        if before is not key.start_mark:
            lines = f"lines {before.line + 1} and {key.start_mark.line + 1}"
            raise ValueError(f"key {key.value!r} is given twice, in {lines}")


def read_yaml(path: Path, remedy: str = "") -> Any:
    """Parse a file in UTF-8, with or without BOM. `remedy`: what to do if it is missing. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}){remedy}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8 (byte {error.start + 1} is {error.object[error.start]:#04x}); save it as UTF-8"
        ) from None
    try:
        return parse_yaml(text)
    except NOT_YAML as error:
        raise ConfigError(f"{path}: is not YAML: {why_unreadable(error)}") from None


def why_unreadable(error: BaseException) -> str:
    """Return in one line why a text is no YAML."""
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    words = " ".join(str(error).split())
    return "an integer has too many digits" if "set_int_max_str_digits" in words else words
