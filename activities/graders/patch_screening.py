"""Drop files from a patch that could change the test runner, before anything of it enters the grading box.

This module applies the table of `integrity_rules.py` on the host. By default the patch is graded without the named
files, and the findings are stored with the verdict; with `grading.integrity: reject` the verdict is `rejected`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePosixPath
from typing import NamedTuple, Self

from activities.graders.diff_sections import GITLINK, FileChange
from activities.graders.integrity_rules import RULES, SHADOWED_MODULES, Rule
from ratchet.types import JsonObject


@dataclass(slots=True, frozen=True)
class Finding:
    """A file of the patch that a rule matched. `action`: `left out`, `put back` if only its runner settings were, or
    `kept, a control run decides`."""

    rule: str
    path: str
    action: str

    @property
    def is_dropped(self) -> bool:
        """Whether the patch lost the file or a part of it."""
        return not self.action.startswith("kept")


@dataclass(slots=True, frozen=True)
class PatchPolicy:
    """The task's own patterns. `test_files` None: the task does not list its tests, so any directory may hold some.
    `controlled`: a control run checks a solved verdict, so edits that honest work needs may be kept.
    """

    test_files: frozenset[str] | None = None
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    controlled: bool = False

    @classmethod
    def of_task(cls, spec: JsonObject, test_files: Iterable[str] | None, controlled: bool = False) -> Self:
        """Read `metadata.integrity` of a task."""
        own = spec.get("integrity") or {}
        listed = None if test_files is None else frozenset(test_files)
        return cls(listed, tuple(own.get("allow", ())), tuple(own.get("deny", ())), controlled)


@dataclass(slots=True)
class ScreenedPatch:
    """`kept`: changes that go into the box. `sections`: path → kind of settings file whose runner part is restored."""

    kept: list[FileChange] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    sections: dict[str, str] = field(default_factory=dict)


@cache
def _glob(pattern: str) -> re.Pattern[str]:
    """Compile a pattern: `**/` any depth, `/**` everything below, `*` and `?` within a name."""
    out = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"/\*\*", "/.*").replace(r"\*\*", ".*")
    return re.compile(out.replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + r"\Z", re.DOTALL)


def matches_pattern(path: str, patterns: Sequence[str]) -> bool:
    """Return whether the path matches one of the patterns."""
    return any(_glob(pattern).match(path) for pattern in patterns)


class _ShadowingModule(NamedTuple):
    """A module name of the standard library or the runner, and the directory that would have to be on the module
    path."""

    directory: str
    name: str


def needs_python_files(changes: Sequence[FileChange]) -> bool:
    """Return whether `screen_patch` needs the base's Python files, to tell a shadowing module from a submodule."""
    return any(_shadowing_module(change) is not None for change in changes)


def _shadowing_module(change: FileChange) -> _ShadowingModule | None:
    """Return the known module that the file could be imported in place of, None without one."""
    if change.deleted:
        return None
    path = PurePosixPath(change.path)
    name = path.name.split(".")[0]
    if path.suffix in (".py", ".so", ".pyd") and name in SHADOWED_MODULES:
        return _ShadowingModule(str(path.parent), name)
    for parent in path.parents:
        if parent.name in SHADOWED_MODULES and path.suffix in (".py", ".so", ".pyd"):
            return _ShadowingModule(str(parent.parent), parent.name)
    return None


def _is_shadow(change: FileChange, packages: frozenset[str], existing: frozenset[str]) -> bool:
    """Return whether a change adds a shadowing module.

    A file inside a package is none: a package's own `types.py` or `json/` is imported by its full name only.
    """
    found = _shadowing_module(change)
    if found is None or change.path in existing:
        return False
    directory, name = found
    inside = directory in packages
    already_there = any(
        f"{'' if directory == '.' else directory + '/'}{name}{tail}" in existing for tail in (".py", "/__init__.py")
    )
    return not inside and not already_there


def _is_test(change: FileChange, policy: PatchPolicy) -> bool:
    """Return whether the change touches a listed test, or replaces one of its directories by a link, file or
    submodule."""
    if policy.test_files is None:
        return False
    if change.path in policy.test_files:
        return True
    return not change.deleted and any(test.startswith(change.path + "/") for test in policy.test_files)


def _applies(
    rule: Rule, change: FileChange, policy: PatchPolicy, packages: frozenset[str], existing: frozenset[str]
) -> bool:
    if rule.kind == "test":
        return _is_test(change, policy)
    if not matches_pattern(change.path, rule.patterns):
        return False
    if rule.kind == "added":
        return change.added
    if rule.kind == "content":
        return re.search(rule.content, change.added_text) is not None
    if rule.kind == "shadow":
        return _is_shadow(change, packages, existing)
    return rule.name != "conftest" or _pytest_would_load(change.path, policy.test_files)


def _pytest_would_load(path: str, test_files: frozenset[str] | None) -> bool:
    """Return whether a conftest.py lies beside or above a listed test; any does if the tests are not listed."""
    if test_files is None:
        return True
    directory = path.rpartition("/")[0]
    return any(not directory or test.startswith(directory + "/") for test in test_files)


def screen_patch(
    changes: Sequence[FileChange], policy: PatchPolicy, existing: frozenset[str] = frozenset()
) -> ScreenedPatch:
    """Apply every rule to every change. `existing`: the base's Python files, if `needs_python_files`."""
    inits = {path for path in existing if path.endswith("__init__.py")}
    inits |= {change.path for change in changes if change.path.endswith("__init__.py") and not change.deleted}
    packages = frozenset(str(PurePosixPath(path).parent) for path in inits) - {"."}
    result = ScreenedPatch()
    for change in changes:
        rule = _rule_for(change, policy, packages, existing)
        if rule is None:
            result.kept.append(change)
        elif rule.sections is not None and not change.deleted and not change.is_symlink:
            result.kept.append(change)
            result.sections[change.path] = rule.sections
        else:
            result.findings.append(Finding(rule.name, change.path, "left out"))
    return result


_DENIED = Rule("denied", "any", (), "the task's own list")
_SUBMODULE = Rule("submodule", "git", (), "a commit of another repository, whose files are nowhere")


def _rule_for(
    change: FileChange, policy: PatchPolicy, packages: frozenset[str], existing: frozenset[str]
) -> Rule | None:
    if matches_pattern(change.path, policy.deny):
        return _DENIED
    if GITLINK in change.modes:
        return _SUBMODULE
    for rule in RULES:
        if _applies(rule, change, policy, packages, existing):
            allowed = rule.kind != "test" and matches_pattern(change.path, policy.allow)
            return None if allowed else rule
    return None
