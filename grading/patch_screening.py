"""Leave files of a patch out that could change the test runner, before anything of it enters the grading box.

If control runs check the verdict, they find a changed runner, and honest work may change its settings. Then only the
task's own tests are left out, the base's data of tests, and what no working tree can hold. If none does, the rules of
`integrity_rules.py` are applied, too. The findings are stored with the verdict.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from grading.diff_sections import EXECUTABLE, GITLINK, FileChange, printable_path, split_diff
from grading.integrity_rules import RULES, Rule
from grading.path_patterns import matches_pattern
from grading.runner_programs import RunnerPrograms, find_programs
from grading.task_tests import BaseTree, TaskTests, parent_directories
from ratchet.types import JsonObject

LEFT_OUT = "left out"
PUT_BACK = "put back"
_MAX_PATH = 4096
_MAX_DEPTH = 200
_PYTHONPATH = re.compile(r"""\bPYTHONPATH=["']?([^\s"';&|]+)""")
_TEST_LISTS = ("fail_to_pass", "pass_to_pass", "FAIL_TO_PASS", "PASS_TO_PASS")


@dataclass(slots=True, frozen=True)
class Finding:
    """A file of the patch that a rule matched. `path`: printable; bytes that are not UTF-8 are escaped."""

    rule: str
    path: str
    action: str

    @classmethod
    def of(cls, rule: Rule, path: str, action: str) -> Self:
        return cls(rule.name, printable_path(path), action)


@dataclass(slots=True, frozen=True)
class PatchPolicy:
    """The task's rules for patches. `test_files` None: the task lists no tests, so any directory may hold some.

    `named_files`: files that its test ids name. `commands`: its test commands. `controlled`: a control run checks every
    verdict that would be solved. `expected`: test files of the base whose tests have to pass as they are. `of_gold`:
    files that the gold patch changes.
    """

    test_files: frozenset[str] | None = None
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    named_files: frozenset[str] = frozenset()
    commands: tuple[str, ...] = ()
    controlled: bool = False
    expected: frozenset[str] = frozenset()
    of_gold: frozenset[str] = frozenset()

    @classmethod
    def of_task(
        cls,
        spec: JsonObject,
        test_files: Iterable[str] | None,
        controlled: bool = False,
        expected: frozenset[str] = frozenset(),
    ) -> Self:
        own = spec.get("integrity") or {}
        return cls(
            test_files=None if test_files is None else frozenset(test_files),
            allow=tuple(own.get("allow", ())),
            deny=tuple(own.get("deny", ())),
            named_files=frozenset(_named_files(spec)),
            commands=tuple(_commands(spec)),
            controlled=controlled,
            expected=expected,
            of_gold=frozenset(change.path for change in split_diff(str(spec.get("gold_patch") or "").encode())),
        )

    @property
    def whole_commands(self) -> list[str]:
        """The commands without those that get the tests' files as arguments."""
        return [command for command in self.commands if "$1" not in command and "$@" not in command]

    @property
    def module_path(self) -> list[str]:
        """The directories that PYTHONPATH names in the row's commands, relative to the repository's root."""
        found = [
            entry for command in self.commands for value in _PYTHONPATH.findall(command) for entry in value.split(":")
        ]
        return [re.sub(r"^(?:\$\{?PWD\}?/?|\./|\.$)", "", entry).strip("/") for entry in found]


def _parts(spec: JsonObject) -> Iterator[JsonObject]:
    yield spec
    for key in ("swe_bench", "swepro", "remote_env_info"):
        if isinstance(spec.get(key), dict):
            yield spec[key]


def _named_files(spec: JsonObject) -> Iterator[str]:
    for part in _parts(spec):
        for key in (*_TEST_LISTS, "expected_tests"):
            for name in part.get(key) or ():
                yield str(name).partition("::")[0].partition(" |")[0].strip()


def _commands(spec: JsonObject) -> Iterator[str]:
    for part in _parts(spec):
        for key in ("eval_cmd", "test_cmd", "run_script", "env_cmds", "f2p_script"):
            if part.get(key):
                yield str(part[key])


@dataclass(slots=True)
class ScreenedPatch:
    """`kept`: changes that go into the box. `sections`: path → rule of a file whose runner part is restored."""

    kept: list[FileChange] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    sections: dict[str, Rule] = field(default_factory=dict)


def screen_patch(changes: Sequence[FileChange], policy: PatchPolicy, base: BaseTree | None = None) -> ScreenedPatch:
    """Apply every rule to every change."""
    screening = _Screening(policy, base or BaseTree())
    result = ScreenedPatch()
    for change in changes:
        rule = screening.rule_for(change)
        if rule is None:
            result.kept.append(change)
        elif rule.sections and not change.deleted and not change.is_symlink:
            result.kept.append(change)
            result.sections[change.path] = rule
        else:
            result.findings.append(Finding.of(rule, change.path, LEFT_OUT))
    return result


_DENIED = Rule("denied", "any", "the task's own list", "docs/tasks.md")
_NO_PATH = Rule("impossible_path", "any", "no working tree has such a path", "docs/integrity.md")
_SUBMODULE = Rule("submodule", "git", "a commit of another repository, whose files are nowhere", "docs/integrity.md")


class _Screening:
    """The rules for one task and one base commit."""

    def __init__(self, policy: PatchPolicy, base: BaseTree) -> None:
        self.policy = policy
        self.base = base
        self.tests = TaskTests(policy.test_files, policy.named_files, base, policy.module_path, policy.whole_commands)

    @cached_property
    def _programs(self) -> RunnerPrograms:
        return find_programs(self.base.settings, self.policy.commands)

    def rule_for(self, change: FileChange) -> Rule | None:
        """Return the first rule that matches, None if the change is kept as it is."""
        path = change.path
        parts = path.split("/")
        if not path or "\0" in path or len(path) > _MAX_PATH or len(parts) > _MAX_DEPTH or ".git" in parts:
            return _NO_PATH
        if matches_pattern(change.path, self.policy.deny):
            return _DENIED
        if GITLINK in change.modes:
            return _SUBMODULE
        for rule in RULES:
            if (rule.always or not self.policy.controlled) and self._applies(rule, change):
                allowed = rule.applies != "test" and matches_pattern(change.path, self.policy.allow)
                return None if allowed else rule
        return None

    def _applies(self, rule: Rule, change: FileChange) -> bool:
        if rule.files and not matches_pattern(change.path, rule.files):
            return False
        if rule.scope == "tests" and not self.tests.reached_by(change.path):
            return False
        if rule.sections and self._is_apart(change):
            return False
        is_new = change.path not in self.base.files and not change.deleted
        match rule.applies:
            case "any":
                return True
            case "program":
                return is_new and (EXECUTABLE in change.modes or change.is_symlink)
            case "test":
                return change.path in self.policy.expected or self.tests.is_listed_test(change)
            case "shadow":
                return self.tests.shadows(change)
            case "data":
                return self.tests.is_data(change.path) and change.path not in self.policy.of_gold
            case "support":
                return change.path in self.tests.support
            case "called":
                return not is_new and self._programs.starts(change.path)

    def _is_apart(self, change: FileChange) -> bool:
        """Return whether a settings file lies in a new directory, without tests: only a file of the base that names it
        could make a runner read it, and no such file names what did not exist."""
        is_known = change.path.rpartition("/")[0] in self._directories
        return not is_known and not self.tests.reached_by(change.path)

    @cached_property
    def _directories(self) -> frozenset[str]:
        return frozenset(parent for path in self.base.files for parent in parent_directories(path)) | {""}
