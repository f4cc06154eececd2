"""Every format gives the same rows, names every mistake by file, row and field, and reads in bounded memory."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from activities.dataset_import import offered_rows
from activities.datasets.base import Problem
from activities.datasets.formats import check_rows, dataset_digest, read_rows
from activities.datasets.lints import lint_rows
from ratchet.built_images import is_built
from ratchet.config import DatasetConfig
from ratchet.errors import DatasetError

META = {"image": "host", "workdir": "/w", "eval_cmd": "pytest -q"}
TEST_PATCH = (
    "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1"
    " +1 @@\n-x\n+y\n"
)
SWE: dict[str, Any] = {
    "instance_id": "psf__requests-1",
    "repo": "psf/requests",
    "base_commit": "abc",
    "problem_statement": "it breaks",
    "patch": "gold",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["tests/test_a.py::test_x"]',
    "PASS_TO_PASS": ["tests/test_a.py::test_y"],
}
PRO: dict[str, Any] = {
    **SWE,
    "FAIL_TO_PASS": "['tests/test_a.py | x']",
    "before_repo_set_cmd": "git reset --hard abc\ngit checkout def -- tests/test_a.py",
    "selected_test_files_to_run": '["tests/test_a.py"]',
    "run_script": "pytest $1",
    "parser_script": "print()",
    "dockerhub_tag": "psf.requests-1",
}


def jsonl(path: Path, *rows: dict[str, Any]) -> DatasetConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(path))


def only(dataset: DatasetConfig) -> dict[str, Any]:
    (row,) = read_rows(dataset, "")
    return row


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path / "d.jsonl", {"text": "fix", "id": "a", "extra": META})
    named = dataset.model_copy(update={"input_key": "text", "label_key": "id", "metadata_key": "extra"})
    assert only(named)["spec"]["problem_statement"] == "fix" and only(named)["label"] == "a"
    assert [row for row in check_rows(dataset) if isinstance(row, Problem)]
    assert dataset_digest(named) != dataset_digest(dataset)


def test_a_second_grader_is_one_too_many(tmp_path: Path) -> None:
    info = {"remote_env_info": {"f2p_script": "x"}}
    (problem,) = check_rows(jsonl(tmp_path / "d.jsonl", {"prompt": "p", "label": "a", "metadata": {**META, **info}}))
    assert "exactly one grader" in str(problem) and "found eval_cmd, f2p_script" in str(problem)


def test_needs_of_a_row_are_kept_as_they_are(tmp_path: Path) -> None:
    needed = {"sandbox.cpus": 2, "limits.eval_seconds": 1.5, "sandbox.network": ["agent", "grade", "pre_commands"]}
    row = {"prompt": "p", "label": "a", "metadata": {**META, "needed_settings": needed}}
    assert only(jsonl(tmp_path / "d.jsonl", row))["spec"]["needed_settings"] == needed


def test_needs_that_are_not_met_are_one_short_list(tmp_path: Path) -> None:
    """A failure of Temporal has a limited size."""
    rows = [
        {"prompt": "p", "label": f"task {n}", "metadata": {**META, "needed_settings": {"sandbox.cpus": 2 + n % 100}}}
        for n in range(20_000)
    ]
    dataset = jsonl(tmp_path / "d.jsonl", *rows)
    assert len(list(offered_rows(dataset, "", {"sandbox.cpus": 200}))) == len(rows)
    with pytest.raises(DatasetError) as raised:
        list(offered_rows(dataset, "", {"sandbox.cpus": 1}))
    text = str(raised.value)
    assert "sandbox.cpus of 2, found 1: 200 tasks: task 0, task 100, " in text
    assert "sandbox.cpus of 3, " in text and len(text) < 20_000


def test_check_lists_every_mistake(tmp_path: Path) -> None:
    good = {"prompt": "p", "label": "a", "metadata": META}
    dataset = jsonl(
        tmp_path / "d.jsonl",
        {**good, "label": 1},
        good,
        {**good, "metadata": {**META, "image": ""}},
        {**SWE, "PASS_TO_PASS": "nonsense("},
    )
    assert [row.row if isinstance(row, Problem) else "good" for row in check_rows(dataset)] == [1, "good", 3, 4]


def needs(name: str, value: Any, message: str) -> tuple[dict[str, Any], str, str]:
    return {"metadata": {**META, "needed_settings": {name: value}}}, f"metadata.needed_settings.{name}", message


_DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"label": "a\0b"}, "label", "contains NUL"),
        ({"prompt": "fix \0 it"}, "prompt", "contains NUL"),
        ({"metadata": {**META, "image": "h\0"}}, "metadata.image", "contains NUL"),
        ({"metadata": {**META, "gold_patch": "diff \0"}}, "metadata.gold_patch", "contains NUL"),
        ({"metadata": {**META, "extra": {"k": ["\0"]}}}, "metadata.extra.k.0", "contains NUL"),
        ({"metadata": {**META, "extra": {"k\0": 1}}}, "metadata.extra", "has the name 'k\\x00'"),
        ({"metadata": {**META, "extra": json.loads(_DEEP)}}, "metadata.extra.0.0", "lists and objects deep"),
        needs("sandbox.cpus", "2", "expected a number, found '2'"),
        needs("sandbox.cpus", True, "expected a number, found True"),
        needs("sandbox.cpus", ["agent"], "expected a number, found ['agent']"),
        needs("limits.eval_seconds", 0, "greater than 0, found 0"),
        needs("limits.agent_seconds", None, "expected a number, found None"),
        needs("sandbox.disk", 5, "expected no such name, found 5"),
        (
            {"metadata": {**META, "needed_settings": {"sandbox.network": 3}}},
            "metadata.needed_settings.sandbox.network",
            "a list",
        ),
        ({"metadata": {**META, "solution_cmd": "true"}}, "metadata", "expected solution_archive beside solution_cmd"),
        ({"metadata": {**META, "solution_archive": "x"}}, "metadata.solution_archive", "expected base64, found 'x'"),
        (
            {"metadata": {**META, "solution_archive": "!!!"}},
            "metadata.solution_archive",
            "expected base64, found '!!!'",
        ),
        ({"metadata": {**META, "agent_environment": {"A;x": "1"}}}, "metadata.agent_environment.A;x.[key]", "'A;x'"),
    ],
)
def test_a_row_that_cannot_be_stored_is_named(
    tmp_path: Path, changes: dict[str, Any], field: str, message: str
) -> None:
    """Also by the check, which asks no store."""
    good = {"prompt": "p", "label": "a", "metadata": META}
    dataset = jsonl(tmp_path / "d.jsonl", good, {**good, **changes})
    _, problem = check_rows(dataset)
    assert isinstance(problem, Problem)
    assert (problem.row, problem.field) == (2, field) and message in problem.message
    with pytest.raises(DatasetError, match=rf"d\.jsonl, row 2, field {re.escape(field)}: "):
        list(read_rows(dataset, ""))


@pytest.mark.parametrize(
    ("extra", "field", "message"),
    [
        (float("nan"), "metadata.extra", "is nan"),
        (b"x", "metadata.extra", "is of the type bytes"),
        (datetime(2026, 1, 1, tzinfo=UTC), "metadata.extra", "is of the type datetime"),
    ],
)
def test_a_parquet_row_that_cannot_be_stored_is_named(tmp_path: Path, extra: Any, field: str, message: str) -> None:
    row = {"prompt": "p", "label": "a", "metadata": {**META, "extra": extra}}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    (problem,) = check_rows(DatasetConfig(path=str(tmp_path / "d.parquet")))
    assert isinstance(problem, Problem) and problem.field == field and message in problem.message


def test_metadata_as_text_may_be_too_deep(tmp_path: Path) -> None:
    deep = '{"a":' * 900 + "1" + "}" * 900
    row = {"prompt": "p", "label": "a", "metadata": f'{json.dumps(META)[:-1]}, "extra": {deep}}}'}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    (problem,) = check_rows(DatasetConfig(path=str(tmp_path / "d.parquet")))
    assert "lists and objects deep" in str(problem)


@pytest.mark.parametrize("as_text", [True, False])
def test_parquet_gives_the_rows_of_jsonl(tmp_path: Path, as_text: bool) -> None:
    rows = [
        {"prompt": f"p{n}", "label": f"l{n}", "metadata": {**META, "pre_commands": ["a", "b"][:n]}} for n in range(3)
    ]
    written = [{**row, "metadata": json.dumps(row["metadata"]) if as_text else row["metadata"]} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(written), tmp_path / "d.parquet")
    from_parquet = list(read_rows(DatasetConfig(path=str(tmp_path / "d.parquet")), ""))
    from_jsonl = list(read_rows(jsonl(tmp_path / "d.jsonl", *rows), ""))
    assert [row["row_digest"] for row in from_parquet] == [row["row_digest"] for row in from_jsonl]


def test_what_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_text("x")
    (problem,) = check_rows(DatasetConfig(path=str(tmp_path / "d.parquet")))
    assert "is not a parquet file" in str(problem)


def test_swe_bench_rows(tmp_path: Path) -> None:
    row = only(jsonl(tmp_path / "d.jsonl", SWE))
    spec = row["spec"]["swe_bench"]
    assert (row["grader"], row["workdir"], row["image"]) == (
        "swe_bench",
        "/testbed",
        "swebench/sweb.eval.x86_64.psf_1776_requests-1:latest",
    )
    assert spec["fail_to_pass"] == ["tests/test_a.py::test_x"] and spec["test_cmd"].endswith(" tests/test_a.py")
    assert row["spec"]["gold_patch"] == "gold"


@pytest.mark.parametrize(
    ("repository", "command", "log_parser"),
    [
        ("django/django", "runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 test_a", "django"),
        ("sympy/sympy", "bin/test", "sympy"),
    ],
)
def test_repositories_with_runners_of_their_own(tmp_path: Path, repository: str, command: str, log_parser: str) -> None:
    spec = only(jsonl(tmp_path / "d.jsonl", {**SWE, "repo": repository}))["spec"]["swe_bench"]
    assert command in spec["test_cmd"] and spec["log_parser"] == log_parser


def test_a_row_of_another_language_must_say_how_its_tests_run(tmp_path: Path) -> None:
    """As in SWE-bench Multilingual: an unknown test command is a mistake."""
    other = {
        **SWE,
        "repo": "somebody/unknown",
        "test_patch": TEST_PATCH.replace("test_a.py", "a_test.go"),
        "FAIL_TO_PASS": '["TestX"]',
    }
    (problem,) = check_rows(jsonl(tmp_path / "d.jsonl", other))
    assert isinstance(problem, Problem) and problem.field == "test_cmd" and "somebody/unknown" in problem.message
    assert (
        only(jsonl(tmp_path / "e.jsonl", {**other, "test_cmd": "go test ./..."}))["spec"]["swe_bench"]["test_cmd"]
        == "go test ./..."
    )


def test_a_row_may_bring_the_sets_own_script(tmp_path: Path) -> None:
    """Only the lines that run the tests are taken; the grading box puts the test files in place."""
    script = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout abc a_test.go
git apply -v - <<'EOF_1'
{TEST_PATCH}+export NOT=this
EOF_1
export GOFLAGS=-mod=mod
: '>>>>> Start Test Output'
go test -v ./...
: '>>>>> End Test Output'
git checkout abc a_test.go
"""
    row = {**SWE, "repo": "somebody/unknown", "eval_script": script, "log_parser": "parse_log_gotest"}
    spec = only(jsonl(tmp_path / "d.jsonl", row))["spec"]["swe_bench"]
    assert (
        spec["test_cmd"] == "cd /testbed\nexport GOFLAGS=-mod=mod\ngo test -v ./..."
        and spec["log_parser"] == "parse_log_gotest"
    )


def test_rows_with_lists_only(tmp_path: Path) -> None:
    """SWE-smith- and R2E-like rows: no test_patch, lower-case names, their own image."""
    row = {
        "instance_id": "x.1",
        "image_name": "org/x",
        "problem_statement": "p",
        "patch": "",
        "FAIL_TO_PASS": ["t/test_a.py::x"],
        "PASS_TO_PASS": [],
    }
    made = only(jsonl(tmp_path / "d.jsonl", row))
    assert (
        made["image"] == "org/x"
        and made["spec"]["swe_bench"]["test_cmd"].endswith(" t/test_a.py")
        and "gold_patch" not in made["spec"]
    )


def test_swe_bench_pro_rows(tmp_path: Path) -> None:
    row = only(jsonl(tmp_path / "d.jsonl", PRO))
    assert (row["grader"], row["workdir"], row["image"]) == ("swepro", "/app", "jefzda/sweap-images:psf.requests-1")
    assert row["spec"]["swepro"]["fail_to_pass"] == ["tests/test_a.py | x"]
    assert row["spec"]["swepro"]["selected_test_files_to_run"] == ["tests/test_a.py"]


def harbor(root: Path, **left_out: bool) -> DatasetConfig:
    task = root / "tasks" / "one"
    (task / "tests" / "data").mkdir(parents=True)
    (task / "instruction.md").write_text("do it")
    (task / "tests" / "test.sh").write_text("pytest tests")
    (task / "tests" / "data" / "x").write_bytes(b"\x00")
    (task / "task.toml").write_text(
        "" if left_out.get("image") else '[environment]\ndocker_image = "img"\nworkdir = "/srv"\n'
    )
    return DatasetConfig(path=str(root / "tasks"))


def test_harbor_directories(tmp_path: Path) -> None:
    row = only(harbor(tmp_path))
    assert (row["label"], row["image"], row["workdir"], row["grader"]) == ("one", "img", "/srv", "eval_cmd")
    assert (
        row["spec"]["test_files"] == ["tests/data/x", "tests/test.sh"] and row["spec"]["problem_statement"] == "do it"
    )
    assert only(DatasetConfig(path=str(tmp_path / "tasks" / "one")))["row_digest"] == row["row_digest"]
    assert (row["spec"]["eval_cmd"], row["spec"]["verifier"]) == ("/tests/test.sh", "harbor")


@pytest.mark.parametrize(
    ("script", "warnings"),
    [
        ("pytest /tests", []),
        ("grep -q done /app/out", ["graded by a reward file alone"]),
    ],
)
def test_a_harbor_script_that_cannot_work_is_named(tmp_path: Path, script: str, warnings: list[str]) -> None:
    dataset = harbor(tmp_path)
    (tmp_path / "tasks" / "one" / "tests" / "test.sh").write_text(script)
    found = [text for text in lint_rows([only(dataset)]) if "gold_patch" not in text]
    assert len(found) == len(warnings) and all(map(str.__contains__, found, warnings)), found


@pytest.mark.parametrize("names", [[], "[]", "", [""], [" "], None])
def test_a_row_whose_tests_have_no_names_is_refused(tmp_path: Path, names: Any) -> None:
    for row in (SWE, PRO):
        (problem,) = check_rows(jsonl(tmp_path / "d.jsonl", {**row, "FAIL_TO_PASS": names}))
        assert isinstance(problem, Problem), row


def test_harbor_without_an_image_is_named(tmp_path: Path) -> None:
    (problem,) = check_rows(harbor(tmp_path, image=True))
    assert isinstance(problem, Problem) and problem.field == "environment.docker_image" and "one" in problem.file
    assert "environment/Dockerfile, found neither" in problem.message


def test_harbor_with_a_dockerfile(tmp_path: Path) -> None:
    dataset = harbor(tmp_path, image=True)
    environment = tmp_path / "tasks" / "one" / "environment"
    environment.mkdir()
    (environment / "Dockerfile").write_text("FROM python:3.12\nWORKDIR /code\n")
    row = only(dataset)
    assert is_built(row["image"]) and row["workdir"] == "/code" and row["spec"]["build_context"]
    (environment / "docker-compose.yaml").write_text("services: {}\n")
    (problem,) = check_rows(dataset)
    assert isinstance(problem, Problem) and "docker-compose.yaml" in problem.message


_READ = """
import resource, sys
from activities.datasets.formats import read_rows
from ratchet.config import DatasetConfig
rows = read_rows(DatasetConfig(path=sys.argv[1]), "")
for count, _ in zip(range(1000), rows): pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
left = sum(1 for _ in rows)
print(left, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_hundred_thousand_rows_are_not_held_in_memory(tmp_path: Path, suffix: str) -> None:
    """Beyond the first thousand rows, 99,000 rows of 700 bytes (150 MB as objects) may cost at most 20 MB."""
    path = tmp_path / f"big.{suffix}"
    row = {"prompt": "p" * 600, "label": "", "metadata": META}
    if suffix == "jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps({**row, "label": str(n)}) + "\n" for n in range(100_000))
    else:
        schema = pyarrow.Table.from_pylist([row]).schema
        with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for start in range(0, 100_000, 1000):
                rows = [{**row, "label": str(n)} for n in range(start, start + 1000)]
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    ended = subprocess.run(
        [sys.executable, "-c", _READ, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[4],
    )
    left, grown_kib = map(int, ended.stdout.split())
    assert left >= 98_999 and grown_kib < 20_000, grown_kib
