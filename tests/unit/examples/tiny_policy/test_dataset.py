"""The quickstart dataset: reproducible byte for byte, disjoint parts, hidden tests that tell fixed from buggy.

A test that passes on the bug, or a held-out bug seen in training, would invalidate every figure.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.tiny_policy.bug_tasks import FAMILIES, BugTask, held_out_tasks, task_digests, train_tasks
from examples.tiny_policy.dataset_rows import dataset_row, row_label

DATASET = Path(__file__).resolve().parents[4] / "datasets" / "quickstart"
BOX_PYTHON = "/opt/ratchet/bin/python3"


def read_rows(part: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATASET / f"{part}.jsonl").read_text().splitlines()]


ROWS = [*zip(read_rows("train"), train_tasks(), strict=True), *zip(read_rows("heldout"), held_out_tasks(), strict=True)]


def row_id(value: object) -> str:
    return str(value["label"]) if isinstance(value, dict) else ""


def load_generator(dataset: Path = DATASET) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{dataset.name}_generate", dataset / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_in(folder: Path, command: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run a command of a row, with `folder` in place of /workspace and this Python in place of the box's."""
    moved = command.replace("/workspace", str(folder)).replace(BOX_PYTHON, python)
    # The box's Python has pytest and no plugins.
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        ["bash", "-c", moved], cwd="/", env=env, capture_output=True, text=True, timeout=60, check=False
    )


def prepare(folder: Path, row: dict[str, Any]) -> Path:
    for command in row["metadata"]["pre_commands"]:
        assert run_in(folder, command).returncode == 0
    return Path(row["metadata"]["workdir"].replace("/workspace", str(folder)))


def check_rows(lines: list[str], tasks: list[BugTask], part: str, readme: str, *executables: str) -> None:
    """Compare committed rows with what the generator makes: the label of each, and every eighth in full, since a row
    depends on nothing but its task and takes a twentieth of a second.
    """
    assert len(lines) == len(tasks)
    for number, (line, task) in enumerate(zip(lines, tasks, strict=True)):
        label = row_label(part, number, task)
        assert json.loads(line)["label"] == label
        if number % 8 == 0:
            assert json.dumps(dataset_row(task, label, readme, executables)) == line


def test_the_generator_makes_the_committed_rows() -> None:
    readme = load_generator().README
    for part, tasks in (("train", train_tasks()), ("heldout", held_out_tasks())):
        lines = (DATASET / f"{part}.jsonl").read_text().splitlines()
        check_rows(lines, tasks, part, readme)


def test_no_bug_occurs_twice_and_families_are_balanced() -> None:
    train, held_out = train_tasks(), held_out_tasks()
    assert len(task_digests([*train, *held_out])) == len(train) + len(held_out) == len(ROWS)
    assert len(held_out) >= 96
    for tasks in (train, held_out):
        assert {sum(task.family == family for task in tasks) for family in FAMILIES} == {len(tasks) // len(FAMILIES)}
    assert len({row["label"] for row, _ in ROWS}) == len(ROWS)


def test_no_row_shows_the_agent_its_test() -> None:
    for row, _ in ROWS:
        assert "test_" not in row["prompt"] + "".join(row["metadata"]["pre_commands"])


def passes(code: str, test: str) -> bool:
    """Run the row's test function on `code` in this process; both come from the generator."""
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    exec(test[test.index("def test_") :], namespace)
    name = next(key for key in namespace if key.startswith("test_"))
    try:
        namespace[name]()
    except Exception:
        return False
    return True


def test_every_hidden_test_passes_the_fix_and_no_other_edit() -> None:
    for row, task in ROWS:
        test = row["metadata"]["eval_cmd"].split("<<'END_OF_FILE'\n")[1].split("END_OF_FILE\n")[0]
        assert passes(task.fixed_source, test), row["label"]
        for wrong in {task.wrong, *task.alternatives}:
            assert not passes(task.source.replace(task.wrong, wrong, 1), test), (row["label"], wrong)


@pytest.mark.parametrize(("row", "task"), ROWS[::20], ids=row_id)
def test_a_row_makes_a_clean_repository_with_the_bug(row: dict[str, Any], task: BugTask, tmp_path: Path) -> None:
    repository = prepare(tmp_path, row)
    assert (repository / task.entry).read_text() == task.source
    git = f"git -C {repository}"
    state = run_in(tmp_path, f"{git} status --porcelain && {git} rev-list --count HEAD && {git} ls-files")
    assert state.stdout.split() == ["1", "README.md", task.entry]


@pytest.mark.parametrize("family", ["arithmetic", "text_method"])
def test_the_whole_evaluation_tells_fixed_from_buggy(family: str, tmp_path: Path) -> None:
    row, task = next((row, task) for row, task in ROWS if task.family == family)
    repository = prepare(tmp_path, row)
    # what a patch may add to fool the runner
    (repository / "conftest.py").write_text("def pytest_sessionfinish(session): session.exitstatus = 0\n")
    (repository / "pytest.py").write_text("raise SystemExit(0)\n")
    (repository / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    assert run_in(tmp_path, row["metadata"]["eval_cmd"]).returncode == 1
    (repository / task.entry).write_text(task.fixed_source)
    assert run_in(tmp_path, row["metadata"]["eval_cmd"]).returncode == 0
