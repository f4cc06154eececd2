"""Translate unchanged rows of SWE-bench and similar sets into rows of this program.

Supported: SWE-bench, Verified, Multilingual and similar rows (`FAIL_TO_PASS`, `PASS_TO_PASS`, `test_patch`; also
SWE-smith and R2E), and SWE-bench Pro (`before_repo_set_cmd`, `selected_test_files_to_run`). Lists may be lists, JSON
text or Python literals. A row that does not say how its tests run gets the command of a known repository, or pytest.
"""

import ast
from typing import Any, NamedTuple

import orjson

from activities.datasets.base import Problem, RawRow
from grading.diff_sections import split_diff
from grading.log_parsers import PARSERS
from ratchet.types import JsonObject

_PYTEST = "pytest -rA --tb=short -p no:cacheprovider {files}"
_ACTIVATE = "source /opt/miniconda3/bin/activate testbed && "
_BY_REPOSITORY = {
    "django/django": ("./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {modules}", "django"),
    "sympy/sympy": (
        "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose {files}",
        "sympy",
    ),
    "sphinx-doc/sphinx": ("tox --current-env -epy39 -v -- {files}", "pytest"),
    "astropy/astropy": ("pytest -rA -vv -o console_output_style=classic --tb=no {files}", "pytest"),
}
_MARKS = (">>>>> Start Test Output", ">>>>> End Test Output")
_SHELL_SETUP = ("source ", ". ", "conda activate ", "export ", "cd ")


def is_swe_row(row: JsonObject) -> bool:
    return "instance_id" in row and any(name in row for name in ("FAIL_TO_PASS", "fail_to_pass"))


def translate_swe_row(row: JsonObject, number: int, file: str) -> RawRow | Problem:
    """Return the row with its metadata in this program's form, or its problem."""
    try:
        fail_to_pass = _names(row, "fail_to_pass")
        pass_to_pass = _names(row, "pass_to_pass")
    except ValueError as error:
        return Problem(file, number, str(error), "expected a list of test names")
    metadata: JsonObject = {
        "image": _image(row),
        "workdir": "/app" if _is_pro(row) else str(row.get("workdir") or "/testbed"),
        "problem_statement": row.get("problem_statement"),
        "gold_patch": row.get("patch") or None,
        "repo": row.get("repo"),
        "base_commit": row.get("base_commit"),
    }
    if _is_pro(row):
        metadata["swepro"] = _pro(row, fail_to_pass, pass_to_pass)
    else:
        files = _test_files(row, [*fail_to_pass, *pass_to_pass])
        run = _how_to_run(row, files)
        if run is None:
            return Problem(
                file,
                number,
                "test_cmd",
                f"expected the command that runs the tests of {row.get('repo')}, which are not pytest's, "
                "here or in an eval_script",
            )
        log_parser = str(row.get("log_parser") or run.log_parser)
        patch = {"test_patch": str(row.get("test_patch") or ""), "test_cmd": run.test_cmd, "log_parser": log_parser}
        if log_parser.removeprefix("parse_log_") not in PARSERS:  # some of the package's parsers need these
            patch |= {name: str(row[name]) for name in ("instance_id", "version") if row.get(name) is not None}
        metadata["swe_bench"] = {"fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass, **patch}
    return RawRow(
        number,
        row.get("instance_id"),
        row.get("problem_statement"),
        {key: value for key, value in metadata.items() if value is not None},
        file,
    )


def _is_pro(row: JsonObject) -> bool:
    return "before_repo_set_cmd" in row


def _names(row: JsonObject, name: str) -> list[str]:
    """Return a list of names, in any of its spellings. Raises ValueError with the field's name."""
    key = name.upper() if name.upper() in row else name
    value = row.get(key, [])
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            try:
                value = ast.literal_eval(value)
            except (SyntaxError, ValueError):
                raise ValueError(key) from None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(key)
    return value


def _image(row: JsonObject) -> Any:
    """Return the image that the row names, else the name that the set's publishers give to an instance's image."""
    for key in ("image", "image_name", "docker_image", "dockerhub_tag"):
        if row.get(key):
            tag = str(row[key])
            return f"jefzda/sweap-images:{tag}" if key == "dockerhub_tag" and ":" not in tag else tag
    instance = str(row.get("instance_id", "")).lower().replace("__", "_1776_")
    return f"swebench/sweb.eval.x86_64.{instance}:latest"


def _test_files(row: JsonObject, names: list[str]) -> list[str]:
    """Return the files of `test_patch`, or those of the named tests if it has none."""
    changed = [change.path for change in split_diff(str(row.get("test_patch") or "").encode()) if not change.deleted]
    return changed or sorted({name.partition("::")[0] for name in names if "::" in name})


class _TestRun(NamedTuple):
    test_cmd: str
    log_parser: str


def _how_to_run(row: JsonObject, files: list[str]) -> _TestRun | None:
    """Return the row's own command, that of a known repository, or pytest on Python files; None without any."""
    if own := row.get("test_cmd") or _command_of_eval_script(str(row.get("eval_script") or "")):
        return _TestRun(str(own), "pytest")
    python = [file for file in files if file.endswith((".py", ".txt", ".rst"))]
    if not python:
        return None
    command, log_parser = _BY_REPOSITORY.get(str(row.get("repo")), (_PYTEST, "pytest"))
    modules = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in python]
    return _TestRun(_ACTIVATE + command.format(files=" ".join(python), modules=" ".join(modules)), log_parser)


def _command_of_eval_script(script: str) -> str | None:
    """Return the lines between the markers of the set's own script, after the lines that set up the shell.

    The rest of the script puts the test files in place, which the grading box has done already.
    """
    lines = script.splitlines()
    start, end = (next((number for number, line in enumerate(lines) if mark in line), None) for mark in _MARKS)
    if start is None or end is None or end <= start + 1:
        return None
    return "\n".join([line for line in lines[:start] if line.startswith(_SHELL_SETUP)] + lines[start + 1 : end])


def _pro(row: JsonObject, fail_to_pass: list[str], pass_to_pass: list[str]) -> JsonObject:
    try:
        files = _names(row, "selected_test_files_to_run")
    except ValueError:
        files = [part.strip() for part in str(row["selected_test_files_to_run"]).split(",") if part.strip()]
    own = {"before_repo_set_cmd": row["before_repo_set_cmd"], "selected_test_files_to_run": files}
    scripts = {name: row[name] for name in ("run_script", "parser_script", "env_cmds") if row.get(name)}
    return {**own, "fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass, **scripts}
