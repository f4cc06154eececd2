"""Find the parts of a repository that belong to the task's tests, and changed files that could be found in their place.

A file is judged by what it can reach. Runners find tests, helpers and settings by directory, by file name and by import
name, so a new file that takes one of these is left out; other new files, also below test directories, are kept.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from grading.diff_sections import FileChange
from grading.integrity_rules import ORDINARY_TESTS, SHADOWED_MODULES
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
_BINARY_SUFFIXES = (".so", ".pyd", ".dll", ".bundle")
_LOADERS = {
    **dict.fromkeys((".py", ".pyc", ".pyo", ".pyw", ".pyd"), frozenset({"python"})),
    **dict.fromkeys(
        (".js", ".mjs", ".cjs", ".jsx", ".ts", ".tsx", ".mts", ".cts", ".json", ".node"), frozenset({"js"})
    ),
    **dict.fromkeys((".rb", ".bundle"), frozenset({"ruby"})),
    ".so": frozenset({"python", "ruby"}),
    ".rs": frozenset({"rust"}),
    ".php": frozenset({"php"}),
}
"""Suffix → the languages that find a file with it by its name without the suffix."""


@dataclass(slots=True, frozen=True)
class BaseTree:
    """The content of the base commit. `files`: all paths. `imports`: lines of tests that import or include something.
    `settings`: path → text of files that have the commands of test runs."""

    files: frozenset[str] = frozenset()
    imports: str = ""
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class _Module:
    """A path as an import finds it. `stem`: without suffix. `loaders`: languages that would load it."""

    stem: str
    loaders: frozenset[str]

    @classmethod
    def of(cls, path: str, is_symlink: bool = False) -> "_Module":
        directory, slash, name = path.rpartition("/")
        at = name.rfind(".")
        if at <= 0 or name.endswith(".d.ts"):
            # A link may lead to a package.
            return cls(path, frozenset({"python", "js", "ruby"}) if is_symlink else frozenset())
        loaders = _LOADERS.get(name[at:], frozenset())
        if name[at:] in _BINARY_SUFFIXES:
            at = name.find(".")
        return cls(directory + slash + name[:at], loaders)

    def name_below(self, directory: str) -> str:
        """Return the dotted name of the module if `directory` is on the module path."""
        relative = self.stem[len(directory) + 1 :] if directory else self.stem
        return relative.removesuffix("/__init__").replace("/", ".")


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
    the module path. `commands`: the row's test commands.
    """

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
        self.roots = self._find_roots()
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
                *(root for root in self.roots if any(path.endswith(".rb") for path in self.files)),
            ]
        )

    def _find_roots(self) -> frozenset[str]:
        """Return the outermost directories with a test-like name above the tests."""
        found = set()
        for path in self.files:
            named = [parent for parent in parent_directories(path) if parent and is_test_name(parent)]
            found.update(named[-1:])
        return frozenset(found)

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

    def is_listed_test(self, change: FileChange) -> bool:
        """Return whether the change touches a listed test, or puts a file or link where a directory of one is."""
        if not self.is_listed:
            return False
        return change.path in self.files or (not change.deleted and change.path in self.above)

    @cached_property
    def support(self) -> frozenset[str]:
        """Files of the base that listed tests may use: all below test directories, every conftest.py that applies to a
        test, and helpers elsewhere; without ordinary tests that nothing imports. Tests themselves if the row does not
        list them.
        """
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
        that tests import, or a part of a listed test's Go package.
        """
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
        return matches_pattern(path, ORDINARY_TESTS) and not self._is_imported(path)

    def _is_imported(self, path: str) -> bool:
        stem = _Module.of(path).stem.rpartition("/")[2]
        return stem in self._imported_words or not _IDENTIFIER.fullmatch(stem)

    @cached_property
    def _imported_words(self) -> frozenset[str]:
        return frozenset(_IDENTIFIER.findall(self.base.imports))

    def is_support(self, change: FileChange) -> bool:
        """Return whether tests use the file, or would: a new module below a test directory that they import."""
        if change.path in self.support:
            return True
        is_new_module = change.path not in self.base.files and _Module.of(change.path, change.is_symlink).loaders
        return bool(is_new_module) and not change.deleted and self.holds(change.path) and self._is_imported(change.path)

    def stands_in(self, change: FileChange) -> bool:
        """Return whether a new file could be found in place of a test, a conftest.py or a helper.

        It differs from one in case or suffix, lies below its name, or has its import name or that of its package. A new
        link below a test directory may lead to anything.
        """
        if change.deleted or change.path in self.base.files or change.path in self.files:
            return False
        if change.path.lower() in self._lower_paths or (change.is_symlink and self.holds(change.path)):
            return True
        module = _Module.of(change.path, change.is_symlink)
        if self._loaded_by.get(module.stem.lower(), frozenset()) & module.loaders:
            return True
        for parent in parent_directories(change.path):
            others = self._loaded_by.get(parent.lower(), frozenset())
            if others & module.loaders & {"python", "rust"} or (others and parent.lower() in self._listed_stems):
                return True
        return any(name in self._taken_names for name in self._names(module))

    @cached_property
    def _protected(self) -> frozenset[str]:
        return self.files | self.support

    @cached_property
    def _lower_paths(self) -> frozenset[str]:
        return frozenset(path.lower() for path in self._protected)

    @cached_property
    def _loaded_by(self) -> dict[str, frozenset[str]]:
        """Stem of each protected file and of each conftest.py that could be → the languages that load it."""
        found: dict[str, frozenset[str]] = {}
        for directory in self.above | self.roots:
            found[f"{directory}/conftest".lstrip("/")] = frozenset({"python"})
        for path in self._protected:
            module = _Module.of(path)
            stem = module.stem.lower()
            found[stem] = found.get(stem, frozenset()) | module.loaders
        return found

    @cached_property
    def _listed_stems(self) -> frozenset[str]:
        return frozenset(_Module.of(path).stem.lower() for path in self.files)

    def _names(self, module: _Module) -> Iterator[str]:
        """Yield the import names of a module, one per directory of the module path that it lies below."""
        if not module.loaders & {"python", "ruby"}:
            return
        for parent in parent_directories(module.stem):
            if parent in self.module_path:
                yield module.name_below(parent).lower()

    @cached_property
    def _taken_names(self) -> frozenset[str]:
        """Import names of protected modules from the root and from their own directory, and of their packages."""
        names = {"conftest"}
        for path in self._protected:
            module = _Module.of(path)
            if not module.loaders & {"python", "ruby"}:
                continue
            root = self._import_root(path) if "python" in module.loaders else path.rpartition("/")[0]
            for directory in {"", root} & self.module_path:
                names.add(module.name_below(directory).lower())
            if path in self.files or not self.is_listed:
                names.update(
                    parent.replace("/", ".").lower() for parent in parent_directories(path) if self.holds(parent + "/x")
                )
        return frozenset(names)

    def shadows(self, change: FileChange) -> bool:
        """Return whether a new module would be imported in place of the standard library or the runner.

        Only a module directly in a directory of the module path is; a package's own `types.py` or `json/` is imported
        by its full name only.
        """
        if change.deleted or change.path in self.base.files:
            return False
        module = _Module.of(change.path, change.is_symlink)
        if "python" not in module.loaders:
            return False
        directory, _, name = module.stem.removesuffix("/__init__").rpartition("/")
        if name not in SHADOWED_MODULES or directory not in self.module_path:
            return False
        place = f"{directory}/{name}".lstrip("/")
        return f"{place}.py" not in self.base.files and f"{place}/__init__.py" not in self.base.files
