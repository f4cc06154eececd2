"""Recipes: the committed ones are complete, an archive must have its digest, and rows hide the tests."""

import base64
import hashlib
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.datasets.archives import File, pack_archive
from activities.datasets.formats import check_rows
from activities.datasets.package_recipes import read_recipes, write_rows
from activities.datasets.package_sources import source_archive
from grading.evidence import look_up
from grading.registry import GRADERS
from ratchet.config import DatasetConfig
from ratchet.errors import DatasetError, MachineError

RECIPES = Path(__file__).parents[4] / "datasets" / "packages"
CODE = b"def half(x):\n    return x // 2\n"
FILES = {
    "src/half.py": CODE,
    "tests/test_half.py": b"def test_half(): ...\n",
    "tests/data/a.txt": b"1",
    "README.md": b"half\n",
    "PKG-INFO": b"x",
    "half.egg-info/entry_points.txt": b"x",
}


def published(files: dict[str, bytes]) -> bytes:
    return base64.b64decode(pack_archive({f"half-1.0/{name}": File(content) for name, content in files.items()}))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve a directory as a package index on this machine."""
    root = tmp_path / "index"
    (root / "half").mkdir(parents=True)
    (root / "half" / "half-1.0.tar.gz").write_bytes(published(FILES))
    (root / "half" / "index.html").write_text(
        '<a href="half-1.0.tar.gz#sha256=00&amp;x" data-requires-python="&gt;=3">half-1.0.tar.gz</a>'
    )

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, directory=str(root), **options)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_address[1]}/")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield root
        server.shutdown()
        thread.join()


def recipe(**changes: Any) -> dict[str, Any]:
    bug = {
        "label": "half-1.0-x",
        "file": "src/half.py",
        "operator": "arithmetic",
        "start": CODE.index(b"//"),
        "end": CODE.index(b"//") + 2,
        "parts": ["*"],
        "sha256": hashlib.sha256(CODE.replace(b"//", b"*")).hexdigest(),
        "fail_to_pass": ["tests/test_half.py::test_half"],
    }
    digest = hashlib.sha256(published(FILES)).hexdigest()
    base = {
        "package": "half",
        "version": "1.0",
        "file": "half-1.0.tar.gz",
        "sha256": digest,
        "import_path": "src",
        "tests": ["tests"],
    }
    passing = {"tests/test_half.py": ["test_half", "test_zero"]}
    return {**base, "passing": passing, "bugs": [{**bug, **changes.pop("bug", {})}], **changes}


def built(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    (tmp_path / "half.json").write_text(json.dumps(recipe(**changes)))
    write_rows(tmp_path / "half.json", tmp_path / "out.jsonl", tmp_path / "cache", "host", "python3", frozenset())
    row: dict[str, Any] = json.loads((tmp_path / "out.jsonl").read_text())
    return row


def names_in(archive: str) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def test_a_row_hides_the_tests_and_holds_the_bug(index: Path, tmp_path: Path) -> None:
    row = built(tmp_path)["metadata"]
    shown = names_in(row["repository_archive"])
    assert sorted(shown) == ["README.md", "src/half.py"] and shown["src/half.py"] == b"def half(x):\n    return x * 2\n"
    assert sorted(names_in(row["tests_archive"])) == row["test_files"] == ["tests/data/a.txt", "tests/test_half.py"]
    assert row["swe_bench"]["pass_to_pass"] == ["tests/test_half.py::test_zero"]
    assert [
        row for row in check_rows(DatasetConfig(path=str(tmp_path / "out.jsonl"))) if not isinstance(row, dict)
    ] == []
    assert "tests/test_half.py::test_half" in row["problem_statement"] and "src/half.py" not in row["problem_statement"]


def test_a_bug_may_move_parts_of_the_source(index: Path, tmp_path: Path) -> None:
    start = CODE.index(b"x //")
    planted = CODE.replace(b"x // 2", b"2 // x")
    parts = [[start + 5, start + 6], [start + 1, start + 5], [start, start + 1]]
    bug = {"start": start, "end": start + 6, "parts": parts, "sha256": hashlib.sha256(planted).hexdigest()}
    assert names_in(built(tmp_path, bug=bug)["metadata"]["repository_archive"])["src/half.py"] == planted


def test_rows_are_the_same_every_time_and_need_no_index_twice(index: Path, tmp_path: Path) -> None:
    first = built(tmp_path)
    (index / "half" / "half-1.0.tar.gz").unlink()
    assert built(tmp_path) == first


def test_another_archive_than_the_recipes_is_refused(index: Path, tmp_path: Path) -> None:
    (index / "half" / "half-1.0.tar.gz").write_bytes(published({**FILES, "src/half.py": b"evil = 1\n"}))
    with pytest.raises(DatasetError, match=r"half-1\.0\.tar\.gz: expected sha256"):
        built(tmp_path)
    assert not (tmp_path / "out.jsonl").exists() and not list((tmp_path / "cache").rglob("*.tar.gz"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bug": {"sha256": "0" * 64}}, "planting gave another file"),
        ({"bug": {"file": "src/other.py"}}, "has no source src/other.py"),
        ({"bug": {"file": "tests/test_half.py"}}, "has no source tests/test_half.py"),
        ({"bug": {"start": 4}}, "planting gave another file"),
        ({"bug": {"parts": ["*", [0, 3]]}}, "planting gave another file"),
        ({"bug": {"parts": [[0, 3, 4]]}}, "half.json: is not a recipe"),
        ({"file": "half-2.0.tar.gz"}, "the package index has no half-2.0.tar.gz"),
        ({"sha256": "short"}, "half.json: is not a recipe"),
    ],
)
def test_what_does_not_fit_is_named(index: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        built(tmp_path, **changes)


def test_an_index_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(MachineError, match="cannot be fetched"):
        source_archive("half", "half-1.0.tar.gz", "0" * 64, tmp_path)


def test_an_archive_cannot_point_outside(index: Path, tmp_path: Path) -> None:
    content = published({"../../evil": b"x"})
    (index / "half" / "half-1.0.tar.gz").write_bytes(content)
    with pytest.raises(DatasetError, match="points out of the archive"):
        built(tmp_path, sha256=hashlib.sha256(content).hexdigest())


def test_the_committed_recipes() -> None:
    recipes = read_recipes(RECIPES)
    labels = [bug.label for recipe in recipes for bug in recipe.bugs]
    assert len(labels) >= 40 and len(set(labels)) == len(labels)
    for one in recipes:
        names = {f"{file}::{name}" for file, listed in one.passing.items() for name in listed}
        assert all(one.is_test(file) for file in one.passing)
        for bug in one.bugs:
            assert set(bug.fail_to_pass) <= names and len(bug.fail_to_pass) < len(names), bug.label
            assert not one.is_test(bug.file)


def test_a_name_without_parameters_stands_for_all_of_them() -> None:
    tests = {
        "t.py::a[1]": "passed",
        "t.py::a[2 x]": "failed",
        "t.py::b[1]": "passed",
        "t.py::b[2]": "xfailed",
        "t.py::abc": "passed",
    }
    expected = {"a": "failed", "b": "passed", "ab": "missing", "a[1]": "passed", "a[2": "failed", "abc": "passed"}
    named = {f"t.py::{name}": outcome for name, outcome in expected.items()}
    assert look_up(tests, named) == named


def test_every_task_was_admitted_with_broken_oracles() -> None:
    """By the present grader, with the broken oracles that it tried. A label has the digest of the file with the bug.

    Two tasks are admitted anew in tests/integration/workflows/test_admission.py.
    """
    lines = (RECIPES / "ADMISSION.md").read_text().splitlines()
    rows = {
        cells[1]: cells[2:] for cells in ([cell.strip() for cell in line.split("|")] for line in lines) if cells[2:]
    }
    labels = [bug.label for recipe in read_recipes(RECIPES) for bug in recipe.bugs]
    assert list(rows)[2:] == labels
    for label in labels:
        grader, gold, empty, _, broken, result, _ = rows[label]
        assert (grader, gold, empty, result) == (f"swe_bench {GRADERS['swe_bench'].version}", "3/3", "3/3", "admitted")
        assert int(broken.partition("/")[0]) >= 3 or ": " in broken, f"{label} has no pool and gives no reason"
