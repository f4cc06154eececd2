"""Restore the test runner's part of files that also hold other settings, such as pyproject.toml or a Makefile.

An honest change of packaging is kept; a changed `addopts` or test script is undone. Files are a patch's, so every
reader is bounded: a file that is too large, nested too deeply or not understood is restored as a whole.
"""

import configparser
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from grading.makefiles import restore_makefile
from grading.package_scripts import RUNNER_KEYS, runner_scripts

MAX_SETTINGS_BYTES = 128 << 10
_MAX_LINE = 2_000
"""Characters. tomllib and configparser need quadratic time for some long lines."""
_TOML_HEADER = re.compile(r"\[{1,2}[A-Za-z0-9_.\"' -]+\]{1,2}\s*(?:#.*)?\Z")
_INI_HEADER = re.compile(r"\[[^\]]+\]\s*(?:[#;].*)?\Z")
_TOOLS = (
    "pytest",
    "tox",
    "coverage",
    "nox",
    "poe",
    "taskipy",
    "ward",
    "pytest-enabler",
    "behave",
    "robot",
    "nose",
    "nose2",
)
_RUNNER_TOML = re.compile(
    rf"(?:tool\.(?:{'|'.join(_TOOLS)}|hatch\.envs|pdm\.scripts|pixi\.(?:tasks|feature))"
    r"|project\.entry-points\.\"?'?pytest11)(?:\W|\Z)"
)
_RUNNER_INI = re.compile(
    r"(?:tool:pytest|pytest|tox|testenv|coverage|run|report|paths|aliases|nosetests|unittest|behave)(?:\W|\Z)",
    re.IGNORECASE,
)
_RUNNER_CARGO = re.compile(r"(?:profile|test|bench|patch|replace)(?:\W|\Z)")
_COMPOSER_RUNNER_KEYS = ("autoload-dev", "config", "repositories", "bin")
_SOURCE = re.compile(r"[\w./+-]+\.(?:c|cc|cpp|cxx|h|hh|hpp|hxx|m|mm|rs|go|java|kt|proto)", re.ASCII)
_TOKEN = re.compile(r"\n[ \t]*|[^\s,()\[\]{}\"'\\]+|[,()\[\]{}\"'\\]")
_SEPARATOR = re.compile(r"[,\"'\\]|\n[ \t]*")


class _Block(NamedTuple):
    """A section of a settings file with its header; the text before the first header has the name ''."""

    name: str
    text: str


def restore_runner_settings(kind: str, path: str, base: bytes | None, patched: bytes) -> bytes | None:
    """Return `patched` with the runner's parts as in `base` (None: the file is new).

    Return None if the parts cannot be told apart, so that the whole file has to be restored.
    """
    if max(len(base or b""), len(patched)) > MAX_SETTINGS_BYTES:
        return None
    try:
        old, new = (base or b"").decode(), patched.decode()
        if not kind.endswith("json") and _longest_line(old, new) > _MAX_LINE:
            return None
        merged = _BY_KIND[kind](path, old, new)
        return None if merged is None else merged.encode()
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, MemoryError, configparser.Error):
        return None


def _longest_line(*texts: str) -> int:
    return max((len(line) for text in texts for line in text.split("\n")), default=0)


def _config(path: str, base: str, patched: str) -> str | None:
    if path.endswith(".toml"):
        return _checked(_merged(_TOML_HEADER, _RUNNER_TOML, base, patched), base, _toml_runner)
    return _checked(_merged(_INI_HEADER, _RUNNER_INI, base, patched), base, _ini_runner)


def _blocks(header: re.Pattern[str], text: str) -> list[_Block]:
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in re.findall(r"[^\n]*\n|[^\n]+\Z", text):
        if line.startswith("[") and header.match(line.rstrip()):
            found.append((line.split("#")[0].strip().strip("[]").strip(), []))
        found[-1][1].append(line)
    return [_Block(name, "".join(lines)) for name, lines in found]


def _merged(header: re.Pattern[str], runner: re.Pattern[str], base: str, patched: str) -> str:
    """Replace the text of the runner's sections by the base's; sections that the patch removed are appended."""
    own: dict[str, str] = {}
    for name, text in _blocks(header, base):
        if runner.match(name):
            own[name] = own.get(name, "") + text
    parts = [own.pop(name, "") if runner.match(name) else text for name, text in _blocks(header, patched)]
    merged = "".join(parts)
    return merged + ("\n" if own and merged and not merged.endswith("\n") else "") + "".join(own.values())


def _checked(merged: str, base: str, view: Callable[[str], Any]) -> str | None:
    """Return `merged` if a parser reads the same runner settings from it as from `base`, else None.

    Guards against spellings that the line-wise split does not recognise.
    """
    return merged if view(merged) == view(base) else None


def _toml_runner(text: str) -> Any:
    document = tomllib.loads(text)
    tool = document.get("tool", {})
    own = {name: tool[name] for name in _TOOLS if name in tool}
    own |= {
        name: tool.get(name, {}).get(part) for name, part in (("hatch", "envs"), ("pdm", "scripts"), ("pixi", "tasks"))
    }
    return own, document.get("project", {}).get("entry-points", {}).get("pytest11")


def _ini_runner(text: str) -> Any:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True, delimiters=("=", ":"))
    parser.read_string(text)
    return {name: dict(parser.items(name)) for name in parser.sections() if _RUNNER_INI.match(name)}


def _cargo(path: str, base: str, patched: str) -> str | None:
    """Restore what decides how tests are built; dependencies, binaries and members of the workspace are kept."""
    known = set(tomllib.loads(base).get("dev-dependencies", {}))

    def view(text: str) -> Any:
        document = tomllib.loads(text)
        package = dict(document.get("package", {}))
        workspace = dict(document.get("workspace", {}))
        keys = ("profile", "test", "bench", "patch", "replace")
        return (
            {key: document.get(key) for key in keys},
            {
                key: package.get(key)
                for key in ("build", "links", "autotests", "autobenches", "autobins", "default-run")
            },
            {
                key: dict(document.get("lib", {})).get(key)
                for key in ("test", "doctest", "harness", "path", "proc-macro")
            },
            {key: workspace.get(key) for key in ("exclude", "default-members")},
            {key: value for key, value in document.get("dev-dependencies", {}).items() if key in known},
        )

    return _checked(_merged(_TOML_HEADER, _RUNNER_CARGO, base, patched), base, view)


def _restored_json(base: str, patched: str, keys: Iterable[str]) -> str | None:
    """Restore these keys and the scripts that tests run. The text is unchanged if nothing had to be restored."""
    old, new = json.loads(base or "{}"), json.loads(patched)
    if not isinstance(old, dict) or not isinstance(new, dict):
        return None
    old_scripts, new_scripts = dict(old.get("scripts") or {}), dict(new.get("scripts") or {})
    runner = runner_scripts(old_scripts).keys() | runner_scripts(new_scripts).keys()
    scripts = {name: value for name, value in new_scripts.items() if name not in runner}
    scripts |= {name: value for name, value in old_scripts.items() if name in runner}
    merged = {name: value for name, value in new.items() if name not in keys}
    merged |= {name: value for name, value in old.items() if name in keys}
    if scripts or "scripts" in new:
        merged["scripts"] = scripts
    return patched if merged == new else json.dumps(merged, indent=2, ensure_ascii=False) + "\n"


def _package_json(path: str, base: str, patched: str) -> str | None:
    return _restored_json(base, patched, RUNNER_KEYS)


def _composer_json(path: str, base: str, patched: str) -> str | None:
    return _restored_json(base, patched, _COMPOSER_RUNNER_KEYS)


def _go_mod(path: str, base: str, patched: str) -> str | None:
    """Keep the file if it differs in requirements only."""
    return patched if _go_directives(patched) == _go_directives(base) else None


def _go_directives(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    block = ""
    for line in text.split("\n"):
        words = line.partition("//")[0].split()
        if not words:
            continue
        if block:
            entry = (block, " ".join(words))
            block = "" if words == [")"] else block
        else:
            entry = (words[0], " ".join(words[1:]))
            block = words[0] if words[-1] == "(" else ""
        if entry[0] not in ("require", "go") and entry[1] not in ("(", ")"):
            found.append(entry)
    return found


def _sources(path: str, base: str, patched: str) -> str | None:
    """Keep the file if it only adds names of sources to lists."""
    return patched if base and _adds_only_sources(base, patched) else None


def _makefile(path: str, base: str, patched: str) -> str | None:
    """Restore what test targets use. A new file could take the place of the Makefile that make has found so far."""
    if not base:
        return None
    return patched if _adds_only_sources(base, patched) else restore_makefile(base, patched)


def _adds_only_sources(base: str, patched: str) -> bool:
    """Return whether `patched` is `base` with names of sources added beside others. What code of such a source does,
    code of the product could do as well.
    """
    old, new = [*_TOKEN.findall(base), ""], [*_TOKEN.findall(patched), ""]
    at = 0
    added: list[str] = []
    for number, token in enumerate(new):
        if at < len(old) and token == old[at]:
            if added and not _is_source_list(added, new[number - len(added) - 1], token):
                return False
            added = []
            at += 1
        else:
            added.append(token)
    return at == len(old) and not added


def _is_source_list(added: list[str], before: str, after: str) -> bool:
    """Return whether added tokens are names of sources with their separators, next to a source, so that the rest of the
    file is read as before: quotes are closed, and a backslash joins no line of the base.
    """
    text = "".join(added)
    names = [token for token in added if not _SEPARATOR.fullmatch(token)]
    joined = any(token == "\\" and following[:1] != "\n" for token, following in pairwise([*added, ""]))
    balanced = text.count('"') % 2 == 0 and text.count("'") % 2 == 0
    # A quote, a comma or a line's end may stand between the added name and the one beside it.
    beside = any(_SOURCE.fullmatch(token) for token in (before, after)) or _SEPARATOR.fullmatch(before) is not None
    return bool(names) and all(map(_SOURCE.fullmatch, names)) and balanced and not joined and beside


_BY_KIND: dict[str, Callable[[str, str, str], str | None]] = {
    "config": _config,
    "package_json": _package_json,
    "composer_json": _composer_json,
    "makefile": _makefile,
    "cargo": _cargo,
    "go_mod": _go_mod,
    "sources": _sources,
}
