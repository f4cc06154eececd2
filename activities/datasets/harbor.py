"""Dataset format: Harbor task directories with `instruction.md`, `task.toml`, `tests/test.sh` and `solution/`.

The tests travel in the row and are put into the grading box only. The image is `environment.docker_image` or
`environment.image` of task.toml; without one it is built from the folder `environment` with its Dockerfile.
`test.sh` runs unprivileged, from `/tests`; solved means a reward file with 1 (`grading/reward_file.py`).
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from activities.datasets.archives import File, pack_archive
from activities.datasets.base import Problem, RawRow
from grading.reward_file import HARBOR
from ratchet.config import DatasetConfig
from sandboxes.build_context import BUILD_CONTEXT, DOCKERFILE, BuildContext, pack_build_context


def is_harbor_task(path: Path) -> bool:
    """Return whether the directory is one Harbor task."""
    return (path / "instruction.md").is_file() and (path / "tests").is_dir()


def read_harbor(path: Path, dataset: DatasetConfig) -> Iterator[RawRow | Problem]:
    """Yield one row per task directory; `path` may be a task itself."""
    directories = [path] if is_harbor_task(path) else sorted(child for child in path.iterdir() if child.is_dir())
    number = 0
    for directory in directories:
        if is_harbor_task(directory):
            number += 1
            try:
                yield _task(directory, number)
            except UnicodeDecodeError as error:
                yield Problem(str(directory), number, "", f"instruction.md or solve.sh is not UTF-8: {error.reason}")
    if number == 0:
        yield Problem(str(path), 0, "", "expected Harbor task directories (instruction.md, tests/), found none")


def _task(directory: Path, number: int) -> RawRow | Problem:
    try:
        settings: dict[str, Any] = (
            tomllib.loads((directory / "task.toml").read_text("utf-8")) if (directory / "task.toml").is_file() else {}
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        return Problem(str(directory / "task.toml"), number, "", f"is not TOML in UTF-8: {error}")
    environment = settings.get("environment", {})
    if not isinstance(environment, dict):
        found = type(environment).__name__
        return Problem(str(directory / "task.toml"), number, "environment", f"expected a table, found {found}")
    built: BuildContext | None = None
    image = environment.get("docker_image") or environment.get("image")
    if not image:
        try:
            built = _build_context(directory / "environment")
        except ValueError as error:
            return Problem(str(directory / "environment"), number, "environment.docker_image", str(error))
        image = built.image
    if not (directory / "tests" / "test.sh").is_file():
        return Problem(str(directory), number, "tests/test.sh", "expected a file, found nothing")
    own_workdir = built.workdir if built is not None else None
    workdir = str(environment.get("workdir") or settings.get("workdir") or own_workdir or "/app")
    files = {
        path.relative_to(directory).as_posix(): File(path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in sorted((directory / "tests").rglob("*"))
        if path.is_file()
    }
    metadata = {
        "image": image,
        "workdir": workdir,
        "problem_statement": (directory / "instruction.md").read_text("utf-8"),
        "test_files": list(files),
        "tests_archive": pack_archive(files),
        "eval_cmd": "bash /tests/test.sh",
        "verifier": HARBOR,
    }
    if built is not None:
        metadata[BUILD_CONTEXT] = built.archive
    solution = directory / "solution" / "solve.sh"
    if solution.is_file():
        metadata["solution_script"] = solution.read_text("utf-8")
    return RawRow(number, directory.name, None, metadata, str(directory))


def _build_context(directory: Path) -> BuildContext:
    """Return what the task's image is built from. Raises ValueError if it cannot be built."""
    if not (directory / DOCKERFILE).is_file():
        raise ValueError("expected an image reference in task.toml or environment/Dockerfile, found neither")
    if composed := next((path.name for path in sorted(directory.glob("*compose*.y*ml"))), None):
        raise ValueError(f"expected one image, found {composed}: tasks of several containers are not supported")
    return pack_build_context(directory)
