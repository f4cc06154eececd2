"""Restore the test runner's part of files that also hold other settings: a Makefile or package.json.

An honest change of packaging is kept; a changed test script is undone. Files are a patch's, so every reader is bounded:
a file that is too large, nested too deeply or not understood is restored as a whole.
"""

import json
import re
from itertools import pairwise

from grading.makefiles import restore_makefile
from grading.package_scripts import RUNNER_KEYS, runner_scripts

MAX_SETTINGS_BYTES = 128 << 10
_MAX_LINE = 2_000
"""Characters. Makefiles need quadratic time for some long lines."""
_SOURCE = re.compile(r"[\w./+-]+\.(?:c|cc|cpp|cxx|h|hh|hpp|hxx|m|mm|rs|go|java|kt|proto)", re.ASCII)
_TOKEN = re.compile(r"\n[ \t]*|[^\s,()\[\]{}\"'\\]+|[,()\[\]{}\"'\\]")
_SEPARATOR = re.compile(r"[,\"'\\]|\n[ \t]*")


def restore_runner_settings(kind: str, base: bytes | None, patched: bytes) -> bytes | None:
    """Return `patched` with the runner's parts as in `base` (None: the file is new).

    Return None if the parts cannot be told apart, so that the whole file has to be restored.
    """
    if max(len(base or b""), len(patched)) > MAX_SETTINGS_BYTES:
        return None
    try:
        old, new = (base or b"").decode(), patched.decode()
        merged = _makefile(old, new) if kind == "makefile" else _package_json(old, new)
        return None if merged is None else merged.encode()
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, MemoryError):
        return None


def _package_json(base: str, patched: str) -> str | None:
    """Restore the runner's keys and the scripts that tests run. The text is unchanged if nothing had to be restored."""
    old, new = json.loads(base or "{}"), json.loads(patched)
    if not isinstance(old, dict) or not isinstance(new, dict):
        return None
    old_scripts, new_scripts = dict(old.get("scripts") or {}), dict(new.get("scripts") or {})
    runner = runner_scripts(old_scripts).keys() | runner_scripts(new_scripts).keys()
    scripts = {name: value for name, value in new_scripts.items() if name not in runner}
    scripts |= {name: value for name, value in old_scripts.items() if name in runner}
    merged = {name: value for name, value in new.items() if name not in RUNNER_KEYS}
    merged |= {name: value for name, value in old.items() if name in RUNNER_KEYS}
    if scripts or "scripts" in new:
        merged["scripts"] = scripts
    return patched if merged == new else json.dumps(merged, indent=2, ensure_ascii=False) + "\n"


def _makefile(base: str, patched: str) -> str | None:
    """Restore what test targets use. A new file could take the place of the Makefile that make has found so far."""
    if not base or max(map(len, [*base.split("\n"), *patched.split("\n")])) > _MAX_LINE:
        return None
    return patched if _adds_only_sources(base, patched) else restore_makefile(base, patched)


def _adds_only_sources(base: str, patched: str) -> bool:
    """Return whether `patched` is `base` with names of sources added beside others. What code of such a source does,
    code of the product could do as well."""
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
    file is read as before: quotes are closed, and a backslash joins no line of the base."""
    text = "".join(added)
    names = [token for token in added if not _SEPARATOR.fullmatch(token)]
    joined = any(token == "\\" and following[:1] != "\n" for token, following in pairwise([*added, ""]))
    balanced = text.count('"') % 2 == 0 and text.count("'") % 2 == 0
    # A quote, a comma or a line's end may stand between the added name and the one beside it.
    beside = any(_SOURCE.fullmatch(token) for token in (before, after)) or _SEPARATOR.fullmatch(before) is not None
    return bool(names) and all(map(_SOURCE.fullmatch, names)) and balanced and not joined and beside
