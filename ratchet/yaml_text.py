"""Read YAML that a person has written; everything that cannot be read is a ConfigError with one sentence."""

from pathlib import Path
from typing import Any

import yaml

from ratchet.errors import ConfigError

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises for a text: ValueError for an impossible date or an integer of thousands of digits."""
_MERGE = "tag:yaml.org,2002:merge"


class _OnceLoader(yaml.SafeLoader):
    """A loader that refuses a key which is given twice: PyYAML would forget the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                before = seen.setdefault((key.tag, key.value), key.start_mark)
                if before is not key.start_mark:
                    lines = f"lines {before.line + 1} and {key.start_mark.line + 1}"
                    raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice, in {lines}")
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Parse a text. Raises one of NOT_YAML."""
    return yaml.load(text, _OnceLoader)  # a SafeLoader


def read_yaml(path: Path, remedy: str = "") -> Any:
    """Parse a file in UTF-8, with or without a byte order mark. `remedy`: what to do if there is no such file.

    Raises ConfigError.
    """
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
