"""Rows of SWE-bench and its relatives as they stand, translated into rows of ours.

Why here: `ratchet tasks import swe_bench_verified.parquet` should just work; what a row lacks (how tests are run) is filled in here, once.
Called by: `activities/datasets/jsonl.py` and `parquet.py`.

Known: SWE-bench, Verified, Multilingual and look-alikes (`FAIL_TO_PASS`, `PASS_TO_PASS`, `test_patch`, also SWE-smith and R2E-like rows), and
SWE-bench Pro (`before_repo_set_cmd`, `selected_test_files_to_run`). Lists may be lists, JSON text or Python literals: never `eval`.
"""

import ast
from typing import Any

import orjson

from activities.datasets.base import Problem, Raw
from activities.graders.patches import split

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


def is_foreign(row: dict[str, Any]) -> bool:
    return "instance_id" in row and any(name in row for name in ("FAIL_TO_PASS", "fail_to_pass"))


def translated(row: dict[str, Any], number: int, file: str) -> Raw | Problem:
    try:
        fail_to_pass, pass_to_pass = _names(row, "fail_to_pass"), _names(row, "pass_to_pass")
    except ValueError as error:
        return Problem(file, number, str(error), "expected a list of test names")
    metadata: dict[str, Any] = {
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
                f"expected the command that runs the tests of {row.get('repo')}, which are not pytest's, here or in an eval_script",
            )
        patch = {
            "test_patch": str(row.get("test_patch") or ""),
            "test_cmd": run[0],
            "log_parser": row.get("log_parser") or run[1],
        }
        metadata["swe_bench"] = {"fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass, **patch}
    return Raw(
        number,
        row.get("instance_id"),
        row.get("problem_statement"),
        {key: value for key, value in metadata.items() if value is not None},
        file,
    )


def _is_pro(row: dict[str, Any]) -> bool:
    return "before_repo_set_cmd" in row


def _names(row: dict[str, Any], name: str) -> list[str]:
    """Raises ValueError with the field's name."""
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


def _image(row: dict[str, Any]) -> Any:
    """What the row names, else the name that the set's publishers give to the image of an instance."""
    for key in ("image", "image_name", "docker_image", "dockerhub_tag"):
        if row.get(key):
            tag = str(row[key])
            return f"jefzda/sweap-images:{tag}" if key == "dockerhub_tag" and ":" not in tag else tag
    instance = str(row.get("instance_id", "")).lower().replace("__", "_1776_")
    return f"swebench/sweb.eval.x86_64.{instance}:latest"


def _test_files(row: dict[str, Any], names: list[str]) -> list[str]:
    """Those of `test_patch`; of the named tests where there is none."""
    changed = [change.path for change in split(str(row.get("test_patch") or "").encode()) if not change.deleted]
    return changed or sorted({name.partition("::")[0] for name in names if "::" in name})


def _how_to_run(row: dict[str, Any], files: list[str]) -> tuple[str, str] | None:
    """(command, log parser): the row's own, that of a repository that is known here, or pytest on Python files; None: nobody says how."""
    repository = str(row.get("repo"))
    if row.get("test_cmd"):
        return str(row["test_cmd"]), "pytest"
    told = _of_eval_script(str(row.get("eval_script") or ""))
    if told is not None:
        return told, "pytest"
    python = [file for file in files if file.endswith((".py", ".txt", ".rst"))]
    if not python:
        return None
    command, log_parser = _BY_REPOSITORY.get(repository, (_PYTEST, "pytest"))
    modules = [file.removeprefix("tests/").removesuffix(".py").replace("/", ".") for file in python]
    return _ACTIVATE + command.format(files=" ".join(python), modules=" ".join(modules)), log_parser


def _of_eval_script(script: str) -> str | None:
    """What stands between the markers of the set's own script, behind the lines that set the shell up.

    The rest of it puts the test files in place, which the grading box has done when tests run.
    """
    lines = script.splitlines()
    start, end = (next((number for number, line in enumerate(lines) if mark in line), None) for mark in _MARKS)
    if start is None or end is None or end <= start + 1:
        return None
    return "\n".join([line for line in lines[:start] if line.startswith(_SHELL_SETUP)] + lines[start + 1 : end])


def _pro(row: dict[str, Any], fail_to_pass: list[str], pass_to_pass: list[str]) -> dict[str, Any]:
    try:
        files = _names(row, "selected_test_files_to_run")
    except ValueError:
        files = [part.strip() for part in str(row["selected_test_files_to_run"]).split(",") if part.strip()]
    own = {"before_repo_set_cmd": row["before_repo_set_cmd"], "selected_test_files_to_run": files}
    scripts = {name: row[name] for name in ("run_script", "parser_script", "env_cmds") if row.get(name)}
    return {**own, "fail_to_pass": fail_to_pass, "pass_to_pass": pass_to_pass, **scripts}
