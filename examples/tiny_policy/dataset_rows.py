"""Rows of a dataset of generated tasks: a git repository with a bug, and a hidden test that tells the fix from it."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from activities.datasets.package_recipes import gold_patch
from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.expected_results import assertions, call_results
from grading.broken_oracles import BrokenOracle, broken_spec, propose, spec_sources

COMMIT_DATE = "2024-01-01T00:00:00Z"
POOL_SIZE = 4
NUM_TRIES = 24

# One command, so that preparing a workspace costs one round trip and three git processes.
PREPARE = """\
set -e
git init -q -b main --template= {workdir}
cd {workdir}
{writes}git add -A
GIT_AUTHOR_DATE={date} GIT_COMMITTER_DATE={date} git -c user.name=Quickstart -c user.email=quickstart@example.invalid \\
  -c gc.auto=0 -c maintenance.auto=false commit -q -m 'Add {stem}'
"""

WRITE = """\
cat > {file} <<'END_OF_FILE'
{text}END_OF_FILE
"""

# The test is outside the repository, and `-P` keeps the repository off the runner's import path, so that no file of a
# patch (conftest.py, pytest.ini, a module called pytest) takes part in the run. Parts of pytest without use here are
# not loaded: starting pytest is half of what a box costs, and they are a fifth of that.
EVALUATE = """\
tests=$(mktemp -d) || exit 70
cat > "$tests/test_hidden.py" <<'END_OF_FILE'
{test}END_OF_FILE
cd {workdir} || exit 70
/opt/ratchet/bin/python3 -B -P -m pytest -q -c /dev/null --rootdir "$tests" -p no:cacheprovider \\
  -p no:unraisableexception -p no:doctest -p no:junitxml -p no:pastebin -p no:legacypath "$tests/test_hidden.py"
"""

TEST = """\
import sys

sys.path.insert(0, {workdir!r})

from {stem} import {function}


def test_{function}():
{asserts}
"""


def hidden_test(task: BugTask) -> str:
    right, wrong = (call_results(text, task.function, task.cases) for text in (task.fixed_source, task.source))
    assert right != wrong, f"the cases of {task.family} do not see the bug in {task.source!r}"
    asserts = assertions(task.fixed_source, task.function, task.cases)
    return TEST.format(workdir=task.workdir, stem=task.stem, function=task.function, asserts=asserts)


def broken_oracles(task: BugTask, eval_cmd: str) -> list[BrokenOracle]:
    """Return the row's pool: two members with larger expected numbers, two with smaller ones, which the fix fails."""
    name = f"test_{task.function}"
    pool: list[BrokenOracle] = []
    for number in range(NUM_TRIES):
        candidate = propose(spec_sources({"eval_cmd": eval_cmd}), [name], number, single=False)
        assert candidate is not None, f"no assertion was found in {eval_cmd!r}"
        is_wanted = not candidate.is_weak and sum(broken.up == candidate.up for broken in pool) < POOL_SIZE // 2
        changed = broken_spec(candidate, {"eval_cmd": eval_cmd})["eval_cmd"]
        if is_wanted and candidate.edits not in [one.edits for one in pool] and fails(changed, task):
            pool.append(replace(candidate, must_fail=(f"test_hidden.py::{name}",), exit_fails=True, edited=()))
    return pool


def fails(eval_cmd: str, task: BugTask) -> bool:
    """Return whether the fixed code fails the test that `eval_cmd` writes."""
    namespace: dict[str, object] = {}
    exec(compile(task.fixed_source, task.entry, "exec"), namespace)
    test = eval_cmd.partition("END_OF_FILE'\n")[2].partition("END_OF_FILE\n")[0]
    exec(compile(test[test.index("def test_") :], "test_hidden.py", "exec"), namespace)
    run_test = namespace[f"test_{task.function}"]
    assert callable(run_test)
    try:
        run_test()
    except Exception:
        return True
    return False


def dataset_row(task: BugTask, label: str, readme: str, executables: Sequence[str]) -> dict[str, object]:
    """`readme`: with `{stem}`, `{function}` and `{file}`."""
    about = readme.format(stem=task.stem, function=task.function, file=task.entry)
    written = {**task.files, "README.md": about}
    writes = "".join(WRITE.format(file=file, text=text) for file, text in written.items())
    writes += "".join(f"chmod +x {file}\n" for file in executables)
    prepare = PREPARE.format(workdir=task.workdir, stem=task.stem, writes=writes, date=COMMIT_DATE)
    eval_cmd = EVALUATE.format(test=hidden_test(task), workdir=task.workdir)
    faulty = task.faulty
    return {
        "prompt": task.issue,
        "label": label,
        "metadata": {
            "image": "host",
            "workdir": task.workdir,
            "problem_statement": task.issue,
            "pre_commands": [prepare],
            "eval_cmd": eval_cmd,
            "gold_patch": gold_patch(faulty, task.files[faulty].encode(), task.fixed_files[faulty].encode()),
            "broken_oracles": [broken.as_json() for broken in broken_oracles(task, eval_cmd)],
            "empty_patch_fails": True,  # `hidden_test` has compared the bug's results with the fix's
            "family": task.family,
        },
    }


def row_label(part: str, number: int, task: BugTask) -> str:
    return f"{part}-{number:03d}-{task.digest[:8]}"


def dataset_text(tasks: Sequence[BugTask], part: str, readme: str, executables: Sequence[str] = ()) -> str:
    labelled = ((task, row_label(part, number, task)) for number, task in enumerate(tasks))
    rows = (dataset_row(task, label, readme, executables) for task, label in labelled)
    return "".join(json.dumps(row) + "\n" for row in rows)


def run_generator(write: Callable[[Path], None], generator: str) -> None:
    """Call `write` with the folder of `generator`, a file beside its datasets, or with the one that `--out` names."""
    parser = argparse.ArgumentParser(description="Write the datasets of this folder.")
    parser.add_argument("--out", type=Path, default=Path(generator).resolve().parent, help="folder for the files")
    write(parser.parse_args().out)
