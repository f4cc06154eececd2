"""Restore the test runner's part of files that also hold other settings: pyproject.toml, package.json, Makefile.

An honest change of packaging is kept; a changed `addopts` or test script is undone.
"""

import configparser
import json
import re
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

_TOML_HEADER = re.compile(r"^\[{1,2}[A-Za-z0-9_.\"' -]+\]{1,2}\s*(?:#.*)?$")
_INI_HEADER = re.compile(r"^\[[^\]]+\]\s*(?:[#;].*)?$")
_RUNNER_TOML = re.compile(
    r"^(?:tool\.(?:pytest|tox|coverage|nox|poe|hatch\.envs|pdm\.scripts)|project\.entry-points\.\"?'?pytest11)(?:\W|$)"
)
_RUNNER_INI = re.compile(
    r"^(?:tool:pytest|pytest|tox|testenv|coverage|run|report|aliases|nosetests|isort:pytest)(?:\W|$)", re.IGNORECASE
)
_JSON_RUNNER_KEYS = ("jest", "mocha", "ava", "nyc", "c8", "vitest", "tap", "karma", "babel", "husky", "lint-staged")
_MAKE_TARGET = re.compile(
    r"^(?:[\w./%-]+\s+)*(?:test|tests|check|pytest|ci|verify|unit|coverage|test[-_.]\S*|check[-_.]\S*)"
    r"(?:\s+\S+)*\s*::?(?!=)"
)
_MAKE_DANGER = re.compile(
    r"^\s*(?:-?include|sinclude|override|export|define|SHELL|\.SHELLFLAGS|MAKEFLAGS|PATH|PYTEST\w*|PYTHON\w*"
    r"|\.ONESHELL|\.RECIPEPREFIX)\b"
    r"|\$[({](?:shell|eval)\b",
    re.MULTILINE,
)


class _Block(NamedTuple):
    """A section of a settings file with its header; the text before the first header has the name ''."""

    name: str
    text: str


class _MakeBlock(NamedTuple):
    is_test: bool
    text: str


def restore_runner_settings(kind: str, path: str, base: str | None, patched: str) -> str | None:
    """Return `patched` with the runner's parts as in `base` (None: the file is new).

    Return None if the parts cannot be told apart, so that the whole file has to be restored.
    """
    return _BY_KIND[kind](path, base or "", patched)


def _config(path: str, base: str, patched: str) -> str | None:
    if path.endswith(".toml"):
        return _checked(_merged(_TOML_HEADER, _RUNNER_TOML, base, patched), base, _toml_runner)
    return _checked(_merged(_INI_HEADER, _RUNNER_INI, base, patched), base, _ini_runner)


def _blocks(header: re.Pattern[str], text: str) -> list[_Block]:
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in text.splitlines(keepends=True):
        if header.match(line.rstrip("\r\n")):
            found.append((line.strip().split("#")[0].strip().strip("[]").strip(), []))
        found[-1][1].append(line)
    return [_Block(name, "".join(lines)) for name, lines in found]


def _merged(header: re.Pattern[str], runner: re.Pattern[str], base: str, patched: str) -> str:
    """Replace the text of the runner's sections by the base's; sections that the patch removed are appended."""
    own = {name: text for name, text in _blocks(header, base) if runner.match(name)}
    parts = [own.pop(name, "") if runner.match(name) else text for name, text in _blocks(header, patched)]
    merged = "".join(parts)
    return merged + ("\n" if own and merged and not merged.endswith("\n") else "") + "".join(own.values())


def _checked(merged: str, base: str, view: Callable[[str], Any]) -> str | None:
    """Return `merged` if a parser reads the same runner settings from it as from `base`, else None.

    Guards against spellings that the line-wise split does not recognise.
    """
    try:
        return merged if view(merged) == view(base) else None
    except (tomllib.TOMLDecodeError, configparser.Error, ValueError):
        return None


def _toml_runner(text: str) -> Any:
    tool = tomllib.loads(text)
    own = {
        name: value
        for name, value in tool.get("tool", {}).items()
        if name in ("pytest", "tox", "coverage", "nox", "poe")
    }
    project = tool.get("project", {})
    return own, project.get("entry-points", {}).get("pytest11"), tool.get("tool", {}).get("hatch", {}).get("envs")


def _ini_runner(text: str) -> Any:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True, delimiters=("=", ":"))
    parser.read_string(text)
    return {name: dict(parser.items(name)) for name in parser.sections() if _RUNNER_INI.match(name)}


def _is_runner_script(name: str) -> bool:
    return "test" in name.lower() or name in (
        "check",
        "ci",
        "verify",
        "prepare",
        "preinstall",
        "postinstall",
        "install",
    )


def _package_json(path: str, base: str, patched: str) -> str | None:
    try:
        old, new = json.loads(base or "{}"), json.loads(patched)
        if not isinstance(old, dict) or not isinstance(new, dict):
            return None
        scripts = {name: value for name, value in dict(new.get("scripts") or {}).items() if not _is_runner_script(name)}
        scripts |= {name: value for name, value in dict(old.get("scripts") or {}).items() if _is_runner_script(name)}
    except (ValueError, TypeError):
        return None
    merged = {name: value for name, value in new.items() if name not in _JSON_RUNNER_KEYS}
    merged |= {name: value for name, value in old.items() if name in _JSON_RUNNER_KEYS}
    if scripts or "scripts" in new:
        merged["scripts"] = scripts
    return patched if merged == new else json.dumps(merged, indent=2, ensure_ascii=False) + "\n"


def _make_blocks(text: str) -> list[_MakeBlock]:
    """Split a Makefile into test targets and the rest; a target ends before a line that is neither recipe nor blank."""
    found: list[tuple[bool, list[str]]] = []
    for line in text.splitlines(keepends=True):
        if _MAKE_TARGET.match(line):
            found.append((True, [line]))
        elif (found and found[-1][0] and (line.startswith("\t") or not line.strip())) or (found and not found[-1][0]):
            found[-1][1].append(line)
        else:
            found.append((False, [line]))
    return [_MakeBlock(is_test, "".join(lines)) for is_test, lines in found]


def _makefile(path: str, base: str, patched: str) -> str | None:
    if set(_MAKE_DANGER.findall(patched)) - set(_MAKE_DANGER.findall(base)):
        return None
    dangerous = {line.strip() for line in patched.splitlines() if _MAKE_DANGER.search(line)}
    if dangerous - {line.strip() for line in base.splitlines()}:
        return None
    old = [text for is_test, text in _make_blocks(base) if is_test]
    new = _make_blocks(patched)
    if [text for is_test, text in new if is_test] == old:
        return patched
    merged = "".join(text for is_test, text in new if not is_test)
    return merged + ("\n" if merged and not merged.endswith("\n") else "") + "".join(old)


_BY_KIND: dict[str, Callable[[str, str, str], str | None]] = {
    "config": _config,
    "package_json": _package_json,
    "makefile": _makefile,
}
