"""Build tasks from published packages: a recipe names the source archive and the bug.

The recipes (`datasets/packages/*.json`) contain no line of the packages' code. The package's own tests are the hidden
tests: they are removed from the agent's repository and put into the grading box. `passing` lists the tests that pass on
the published sources, `fail_to_pass` those that the bug breaks.
"""

import hashlib
import os
import posixpath
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from activities.datasets.archives import File, pack_archive, unpack_archive
from activities.datasets.package_sources import source_archive
from ratchet.errors import DatasetError
from ratchet.types import JsonObject

PYTHON = "/opt/ratchet/bin/python3"
_LEFT_OUT = ("PKG-INFO",)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PackageBug(_Model):
    """One planted bug: `parts`, texts or ranges of the file's bytes, in place of the bytes from `start` to `end`.

    `operator`: the kind of bug. `sha256`: of the file with the bug. `symptoms`: the runner's line on some of
    `fail_to_pass`.
    """

    label: str = Field(pattern=r"^[a-z0-9._-]+$")
    file: str
    operator: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)
    parts: list[str | tuple[int, int]]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    fail_to_pass: list[str] = Field(min_length=1)
    symptoms: list[str] = []

    def plant(self, source: bytes) -> bytes:
        """Return the source with the bug."""
        parts = [part.encode() if isinstance(part, str) else source[slice(*part)] for part in self.parts]
        return b"".join([source[: self.start], *parts, source[self.end :]])


class PackageRecipe(_Model):
    """One package. `import_path`: directory for the module path. `tests`: hidden files or directories.

    `passing`: test file → names of tests in it, without parameters, that pass on the published sources.
    """

    package: str
    version: str
    file: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    import_path: str
    tests: list[str] = Field(min_length=1)
    passing: dict[str, list[str]] = {}
    bugs: list[PackageBug] = []

    @property
    def workdir(self) -> str:
        """The repository's directory in the box."""
        return f"/workspace/{self.package}"

    def is_test(self, path: str) -> bool:
        """Return whether a path is hidden from the agent."""
        return any(path == test or path.startswith(test + "/") for test in self.tests)

    def command(self, python: str) -> str:
        """Return the test command, which ignores the repository's own settings and pytest's cache."""
        path = posixpath.join(self.workdir, self.import_path) if self.import_path != "." else self.workdir
        options = f"-q -rf -p no:cacheprovider -c /dev/null --rootdir={self.workdir}"
        return f"COLUMNS=250 PYTHONPATH={path} {python} -B -m pytest {options} {' '.join(self.tests)}"


def read_recipes(path: Path) -> list[PackageRecipe]:
    """Read one file, or every `*.json` of a directory. Raises DatasetError with the file's name."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise DatasetError(f"{path}: holds no recipes (*.json)")
    recipes = []
    for file in files:
        try:
            recipes.append(PackageRecipe.model_validate_json(file.read_bytes()))
        except (ValidationError, OSError) as error:
            raise DatasetError(f"{file}: is not a recipe: {' '.join(str(error).split())[:400]}") from None
    return recipes


def write_rows(recipes: Path, target: Path, cache: Path, image: str, python: str, only: frozenset[str]) -> list[str]:
    """Write the dataset atomically and return its labels. `only`: labels to write, empty for all. Raises DatasetError
    if a recipe does not fit its archive, or for a label that no recipe has."""
    labels: list[str] = []
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            for recipe in read_recipes(recipes):
                for row in recipe_rows(recipe, cache, image, python, only):
                    file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
                    labels.append(row["label"])
        if unknown := only - set(labels):
            raise DatasetError(f"{recipes}: no recipe has a bug with the label {', '.join(sorted(unknown))}")
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return labels


def recipe_sources(recipe: PackageRecipe, cache: Path) -> dict[str, File]:
    """Return the package's files as published, without build products."""
    files = unpack_archive(source_archive(recipe.package, recipe.file, recipe.sha256, cache))
    return {
        name: file
        for name, file in files.items()
        if name not in _LEFT_OUT and ".egg-info/" not in name and not name.endswith(".pyc")
    }


def recipe_rows(
    recipe: PackageRecipe, cache: Path, image: str = "host", python: str = PYTHON, only: frozenset[str] = frozenset()
) -> Iterator[JsonObject]:
    """Yield rows of the JSONL format. Raises DatasetError if archive and recipe do not fit."""
    bugs = [bug for bug in recipe.bugs if not only or bug.label in only]
    if not bugs:
        return
    files = recipe_sources(recipe, cache)
    tests = {name: file for name, file in files.items() if recipe.is_test(name)}
    shown = {name: file for name, file in files.items() if name not in tests}
    hidden = {"test_files": sorted(tests), "tests_archive": pack_archive(tests)}
    names = [f"{file}::{name}" for file, listed in recipe.passing.items() for name in listed]
    for bug in bugs:
        yield {
            "prompt": problem_statement(recipe, bug, python),
            "label": bug.label,
            "metadata": {
                "image": image,
                "workdir": recipe.workdir,
                "problem_statement": problem_statement(recipe, bug, python),
                "package": recipe.package,
                "version": recipe.version,
                "operator": bug.operator,
                **_planted(recipe, bug, shown),
                **hidden,
                "swe_bench": {
                    "fail_to_pass": bug.fail_to_pass,
                    "pass_to_pass": sorted(set(names) - set(bug.fail_to_pass)),
                    "test_cmd": recipe.command(python),
                    "log_parser": "pytest",
                },
            },
        }


def _planted(recipe: PackageRecipe, bug: PackageBug, files: dict[str, File]) -> dict[str, str]:
    if bug.file not in files:
        raise DatasetError(f"{bug.label}: {recipe.file} has no source {bug.file}")
    original = files[bug.file]
    broken = bug.plant(original.content)
    if hashlib.sha256(broken).hexdigest() != bug.sha256:
        raise DatasetError(f"{bug.label}: planting gave another file than the recipe's; restore the recipe")
    return {
        "repository_archive": pack_archive({**files, bug.file: File(broken, original.executable)}),
        "gold_patch": gold_patch(bug.file, broken, original.content),
    }


def gold_patch(path: str, broken: bytes, original: bytes) -> str:
    """Return the diff that removes the bug, in git's format."""
    changes = unified_diff(_lines(broken), _lines(original), f"a/{path}", f"b/{path}")
    ended = [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in changes]
    return "".join([f"diff --git a/{path} b/{path}\n", *ended])


def _lines(content: bytes) -> list[str]:
    """Split into lines with their ends; only a line feed ends a line, as for git."""
    *whole, last = content.decode().split("\n")
    return [line + "\n" for line in whole] + ([last] if last else [])


_STATEMENT = """\
The sources of {package} {version} in {workdir} have a defect. The project's test suite, which is not part of this \
checkout, finds it: {count} on the sources as they should be and fail here.

{symptoms}

Find the cause in the sources and mend it. Every other test of the suite passes and has to go on passing. \
Python is {python}; {import_path} belongs on its module path.
"""


def problem_statement(recipe: PackageRecipe, bug: PackageBug, python: str) -> str:
    """Return the task's statement, with up to 12 failing tests and their symptoms."""
    told = {symptom.partition(" - ")[0].partition("[")[0] for symptom in bug.symptoms}
    lines = [*bug.symptoms, *(name for name in bug.fail_to_pass if name not in told)][:12]
    count = len(bug.fail_to_pass)
    more = f"\n- and {count - len(lines)} more" if count > len(lines) else ""
    return _STATEMENT.format(
        package=recipe.package,
        version=recipe.version,
        workdir=recipe.workdir,
        count="1 test passes" if count == 1 else f"{count} tests pass",
        symptoms="\n".join(f"- {line}" for line in lines) + more,
        python=python,
        import_path=posixpath.normpath(posixpath.join(recipe.workdir, recipe.import_path)),
    )
