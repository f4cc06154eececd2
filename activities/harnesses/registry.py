"""Harnesses by name: those of this folder, or a class that the config names by its import path."""

import re

from activities.harnesses.base import BaseHarness
from ratchet.errors import ConfigError
from ratchet.import_path import import_object
from ratchet.suggestions import did_you_mean

HARNESSES = {
    "bash_agent": "activities.harnesses.bash_agent.harness:BashAgent",
    "claude_code": "activities.harnesses.claude_code:ClaudeCode",
    "codex": "activities.harnesses.codex:Codex",
    "opencode": "activities.harnesses.opencode:OpenCode",
    "qwen_code": "activities.harnesses.qwen_code:QwenCode",
    "mini_swe_agent": "activities.harnesses.mini_swe_agent:MiniSweAgent",
}
_IMPORT_PATH = re.compile(r"[\w.]+:\w+")


class Harnesses(dict[str, BaseHarness]):
    """Harnesses, made once per name. `harnesses[name]` raises ConfigError for an unknown name."""

    def __missing__(self, name: str) -> BaseHarness:
        return self.setdefault(name, load_harness(name))


def load_harness(name: str) -> BaseHarness:
    """Make the harness of this name or import path. Raises ConfigError if it cannot be loaded."""
    path = HARNESSES.get(name, name)
    if not _IMPORT_PATH.fullmatch(path):
        raise ConfigError(
            f"harness.name: {name!r} is none of {', '.join(HARNESSES)}, "
            f"nor an import path like `my_package.my_agent:MyAgent`{did_you_mean(name, HARNESSES)}"
        )
    try:
        made = import_object(path)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"harness.name: {name!r} cannot be loaded: {error}") from error
    if not isinstance(made, BaseHarness):
        raise ConfigError(f"harness.name: {name!r} is not a BaseHarness (activities/harnesses/base.py)")
    return made
