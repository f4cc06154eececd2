"""Files and functions that the pages name exist, and a dead link is found."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}

PATHS_OF_TASKS = {"tests/test.sh"}
"""Paths inside a user's task directory, not in this repository."""

CODE = re.compile(r"`([^`\n]+)`")
NAMED_DEFINITION = re.compile(r"^(?P<file>[\w/]+\.py):(?P<name>[A-Za-z_][\w.]*)$")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


@cache
def definitions(file: Path) -> frozenset[str]:
    """`function`, `Class` and `Class.method` of a file, and names assigned at its top level."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{member.name}"
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def named_paths(page: Path) -> Iterator[str]:
    """Paths in backticks that start at the repository's root; `a|b` in a path stands for both."""
    for code in CODE.findall(prose(page)):
        path = NAMED_DEFINITION.sub(r"\g<file>", code)
        if path in PATHS_OF_TASKS:
            continue
        if path.split("/")[0] in TOP_FOLDERS and "/" in path and re.fullmatch(r"[\w./|*-]+", path):
            yield path


def alternatives(path: str) -> list[str]:
    """`a/b|c` as `a/b` and `a/c`."""
    head, slash, last = path.rpartition("/")
    return [f"{head}{slash}{one}".strip("/") for one in last.split("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    missing = [path for path in named_paths(page) if not all(any(ROOT.glob(one)) for one in alternatives(path))]
    assert [path for path in missing if not path.startswith("docs/reference")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_definitions_exist(page: Path) -> None:
    found = [match for code in CODE.findall(page.read_text()) if (match := NAMED_DEFINITION.match(code))]
    missing = [
        match[0]
        for match in found
        if not (ROOT / match["file"]).is_file() or match["name"] not in definitions(ROOT / match["file"])
    ]
    assert missing == []


def checked(root: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/generate_pages.py", "--check", "--root", str(root)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_what_a_page_lacks_is_found(all_pages: Path, tmp_path: Path) -> None:
    shutil.copytree(all_pages, tmp_path, dirs_exist_ok=True)
    page = tmp_path / "docs" / "operating.md"
    links = "[x](nothing.md)\n[x](reference/glossary.md#no-heading)"
    text = page.read_text().replace("# Operating", f"# Operating\n{links}")
    page.write_text(text.replace("RATCHET_TEMPORAL_CONFIG", "a variable"))
    done = checked(tmp_path)
    assert done.returncode != 0
    assert "docs/operating.md: no nothing.md" in done.stderr
    assert "no reference/glossary.md#no-heading" in done.stderr
    assert "variable RATCHET_TEMPORAL_CONFIG: no page names it" in done.stderr


def test_complete_pages_lack_nothing(all_pages: Path) -> None:
    done = checked(all_pages)
    assert done.returncode == 0, done.stderr


def test_generated_pages_are_not_committed() -> None:
    kept = subprocess.run(["git", "ls-files", "docs/reference"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert kept.stdout == ""


def test_the_walks_name_functions() -> None:
    """Otherwise an edit of the format could leave `test_named_definitions_exist` without anything to check."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    for walk in page.split("\n## ")[2:]:
        assert len([code for code in CODE.findall(walk) if NAMED_DEFINITION.match(code)]) >= 8, walk.splitlines()[0]


def test_the_first_hours_config_is_that_of_the_quickstart() -> None:
    page = (ROOT / "docs" / "first_hour.md").read_text()
    shown = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    quickstart = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    own = {"datasets": [{"path": "my_tasks.jsonl"}], "harness": quickstart["harness"] | {"name": "my_agent:MyAgent"}}
    assert shown == quickstart | own
    run = quickstart["training"]
    said = f"{run['steps']} steps of {run['groups_per_step']} groups of {run['group_size']} rollouts"
    assert said in page
