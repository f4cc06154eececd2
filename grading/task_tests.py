"""Find the parts of a repository that belong to the task's tests, and new modules that hide the runner's."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from grading.diff_sections import FileChange
from grading.integrity_rules import ORDINARY_TESTS, SHADOWED_MODULES, SOURCES
from grading.path_patterns import matches_pattern

_TEST_WORDS = frozenset(
    {"test", "tests", "testing", "testsuite", "testsuites", "unittest", "unittests", "spec", "specs", "e2e", "t"}
)
_HELPER_DIRECTORIES = frozenset(
    {"__snapshots__", "__mocks__", "__fixtures__", "testdata", "test_data", "golden", "goldens"}
)
_HELPER_NAME = re.compile(r"tests?[-_]?(?:util|help|support|lib|common|fixture|mock|case|kit|base)", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9]+")
_IDENTIFIER = re.compile(r"\w+")
_SOURCE_DIRECTORIES = ("src", "lib")


@dataclass(slots=True, frozen=True)
class BaseTree:
    """The content of the base commit. `files`: all paths. `imports`: lines of tests that import or include something.
    `settings`: path → text of files that have the commands of test runs."""

    files: frozenset[str] = frozenset()
    imports: str = ""
    settings: dict[str, str] = field(default_factory=dict)


def parent_directories(path: str) -> Iterator[str]:
    """Yield the directories of a path from the nearest to the repository's root, which is ''."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def is_test_name(directory: str) -> bool:
    """Return whether the last name of the directory has a word like `test`."""
    return any(word.lower() in _TEST_WORDS for word in _WORD.findall(directory.rpartition("/")[2]))


class TaskTests:
    """The task's tests in a base commit. `listed` None: the row does not list its tests, so that every file of the base
    that is named like a test counts. `named`: files that the row's test ids name. `module_path`: more directories on
    the module path. `commands`: the row's test commands."""

    def __init__(
        self,
        listed: frozenset[str] | None,
        named: frozenset[str],
        base: BaseTree,
        module_path: Iterable[str] = (),
        commands: Iterable[str] = (),
    ) -> None:
        self.base = base
        self.is_listed = listed is not None
        own = {path for path in base.files if matches_pattern(path, ORDINARY_TESTS)} if listed is None else listed
        self.files = frozenset(own) | (named & base.files)
        self.above = frozenset(parent for path in self.files for parent in parent_directories(path))
        self.roots = self._find_roots(-1)
        self._data_roots = self._find_roots(0)
        packages = {path.rpartition("/")[0] for path in base.files if path.rpartition("/")[2] == "__init__.py"}
        self._packages = frozenset(packages)
        # pytest without a path collects every directory, and loads each conftest.py that it meets.
        self.collects_all = any(
            "pytest" in command and not any(path in command for path in (*self.files, *self.roots))
            for command in commands
        )
        self.module_path = frozenset(
            [
                "",
                *module_path,
                *(name for name in _SOURCE_DIRECTORIES if name not in packages),
                *(self._import_root(path) for path in self.files if path.endswith(".py")),
            ]
        )

    def _find_roots(self, at: int) -> frozenset[str]:
        """Return the directories with a test-like name above the tests: of each the innermost (0) or outermost (-1)."""
        above = ([one for one in parent_directories(path) if one and is_test_name(one)] for path in self.files)
        return frozenset(named[at] for named in above if named)

    def _import_root(self, path: str) -> str:
        """Return the directory that pytest puts on the module path: the nearest one that is no package."""
        return next(parent for parent in parent_directories(path) if not parent or parent not in self._packages)

    def holds(self, path: str) -> bool:
        """Return whether the path lies below a test directory."""
        return any(parent in self.roots for parent in parent_directories(path))

    def reached_by(self, path: str) -> bool:
        """Return whether settings in this file could apply to a test: it lies beside, above or below one."""
        directory, _, name = path.rpartition("/")
        if not self.files or (self.collects_all and name == "conftest.py"):
            return True
        return not directory or directory in self.above or self.holds(path)

    def is_data(self, path: str) -> bool:
        """Return whether a file of the base is data below a test directory, or expected output."""
        above = frozenset(parent_directories(path))
        is_near = not above.isdisjoint(self._data_roots) or not _HELPER_DIRECTORIES.isdisjoint(path.split("/")[:-1])
        return is_near and path in self.base.files and not matches_pattern(path, SOURCES)

    def is_listed_test(self, change: FileChange) -> bool:
        """Return whether the change touches a listed test, or puts a file or link where a directory of one is."""
        if not self.is_listed:
            return False
        return change.path in self.files or (not change.deleted and change.path in self.above)

    @cached_property
    def support(self) -> frozenset[str]:
        """Files of the base that listed tests may use: all below test directories, every conftest.py that applies to a
        test, and helpers elsewhere; without ordinary tests that nothing imports. Tests themselves if the row does not
        list them."""
        below = {path for path in self.base.files if self.holds(path)}
        conftests = {
            path for path in self.base.files if path.rpartition("/")[2] == "conftest.py" and self.reached_by(path)
        }
        if not self.is_listed:
            return frozenset(below | conftests | self.files)
        own = frozenset(path for path in below | conftests if path not in self.files and not self._stands_alone(path))
        return own | {path for path in self.base.files - self.files if self._is_helper(path)}

    def _is_helper(self, path: str) -> bool:
        """Return whether a file outside test directories belongs to tests: expected output, a module with such a name
        that tests import, or a part of a listed test's Go package."""
        *directories, name = path.split("/")
        if path.endswith("_test.go"):
            return "/".join(directories) in self._listed_directories
        if not _HELPER_DIRECTORIES.isdisjoint(directories):
            return True
        names = [part.partition(".")[0] for part in (*directories[-1:], name) if _HELPER_NAME.match(part)]
        return any(part in self._imported_words or not _IDENTIFIER.fullmatch(part) for part in names)

    @cached_property
    def _listed_directories(self) -> frozenset[str]:
        return frozenset(path.rpartition("/")[0] for path in self.files)

    def _stands_alone(self, path: str) -> bool:
        stem = path.rpartition("/")[2].partition(".")[0]
        is_imported = stem in self._imported_words or not _IDENTIFIER.fullmatch(stem)
        return matches_pattern(path, ORDINARY_TESTS) and not is_imported

    @cached_property
    def _imported_words(self) -> frozenset[str]:
        return frozenset(_IDENTIFIER.findall(self.base.imports))

    def shadows(self, change: FileChange) -> bool:
        """Return whether a new module would be imported in place of the standard library or the runner.

        Only a module directly on the module path is: a package's own `types.py` is imported by its full name.
        """
        if change.deleted or change.path in self.base.files:
            return False
        directory, _, name = change.path.removesuffix("/__init__.py").rpartition("/")
        name = name.partition(".")[0]
        if name not in SHADOWED_MODULES or directory not in self.module_path:
            return False
        place = f"{directory}/{name}".lstrip("/")
        return f"{place}.py" not in self.base.files and f"{place}/__init__.py" not in self.base.files
