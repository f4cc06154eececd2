"""Tell new classes of the JVM that would be loaded in place of a test library's from the repository's own code.

In a test library's own repository the library's packages are the product's. The sources of the base commit decide: a
package in which they have a class, and each package below it, is the repository's own.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from grading.task_tests import TaskTests, is_test_name, parent_directories

_CLASS_SUFFIXES = (".java", ".kt", ".scala", ".groovy")


class _Place(NamedTuple):
    """A directory in two parts: the source root and the package below it."""

    root: str
    package: str


def _places(path: str, namespace: str) -> Iterator[_Place]:
    """Yield each way to read the path as one of a class below the namespace."""
    directory = path.rpartition("/")[0]
    framed, wanted = f"/{directory}/", f"/{namespace}/"
    at = framed.find(wanted)
    while at >= 0:
        yield _Place(directory[: max(at - 1, 0)], directory[at:])
        at = framed.find(wanted, at + 1)


class LibraryPackages:
    """The packages of test libraries' namespaces that a base commit has."""

    def __init__(self, files: Iterable[str], tests: TaskTests) -> None:
        self._classes = [path for path in files if path.endswith(_CLASS_SUFFIXES) and path not in tests.files]
        self._directories = frozenset(path.rpartition("/")[0] for path in self._classes)
        self._own: dict[str, frozenset[str]] = {}

    def are_entered_by(self, path: str, patterns: Sequence[str]) -> bool:
        """Return whether a new file of this path is in a package that is not the repository's own, and in a directory
        in which the base has no class, neither of the product nor of tests.

        `patterns`: `**/NAMESPACE/**`, one for each library.
        """
        if path.rpartition("/")[0] in self._directories:
            return False
        namespaces = [pattern.removeprefix("**/").removesuffix("/**") for pattern in patterns]
        return any(
            self._own_packages(namespace).isdisjoint((place.package, *parent_directories(place.package)))
            for namespace in namespaces
            for place in _places(path, namespace)
        )

    def _own_packages(self, namespace: str) -> frozenset[str]:
        """Return the packages of the namespace in which the base has classes, outside directories of tests."""
        if namespace not in self._own:
            places = (place for path in self._classes for place in _places(path, namespace))
            self._own[namespace] = frozenset(place.package for place in places if not _is_below_tests(place.root))
        return self._own[namespace]


def _is_below_tests(root: str) -> bool:
    return any(is_test_name(parent) for parent in (root, *parent_directories(root)))
