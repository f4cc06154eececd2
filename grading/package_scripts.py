"""Tell which scripts of package.json and composer.json a test run starts."""

import re
from typing import Any

_RUNNER_NAMES = frozenset(
    ("check", "ci", "verify", "prepare", "preinstall", "postinstall", "install", "spec", "e2e", "unit", "coverage",
     "jest", "mocha", "vitest", "ava", "tap", "karma", "cypress", "playwright", "phpunit", "pest")
)  # fmt: skip
RUNNER_KEYS = (
    "jest", "mocha", "ava", "nyc", "c8", "vitest", "tap", "karma", "babel", "husky", "lint-staged", "jasmine",
    "cypress", "wireit", "packageManager", "volta", "ts-node", "testling", "uvu", "config",
)  # fmt: skip
"""Keys of package.json that configure a runner."""
_WORD = re.compile(r"[^\s\"'&|;]+")


def is_runner_script(name: str) -> bool:
    """Return whether a script's name is one that starts tests, or that a package manager runs by itself."""
    parts = re.split(r"[:_.-]", name.lower())
    return "test" in name.lower() or any(part in _RUNNER_NAMES for part in parts)


def runner_scripts(scripts: Any) -> dict[str, str]:
    """Return the scripts that start tests and those that they name, at any depth, with what runs before and after."""
    texts = {name: _text(value) for name, value in scripts.items()} if isinstance(scripts, dict) else {}
    found: dict[str, str] = {}
    waiting = [name for name in texts if is_runner_script(name)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = texts[name]
        words = {word.removeprefix("@") for word in _WORD.findall(texts[name])}
        waiting += [other for other in (*words, f"pre{name}", f"post{name}") if other in texts]
    return found


def _text(value: Any) -> str:
    """Return a script as text; composer allows a list of commands."""
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)
