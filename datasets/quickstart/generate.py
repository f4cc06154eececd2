"""Write `train.jsonl` and `heldout.jsonl` beside this file: one-line bugs in real git repositories, with hidden tests.

The rows are committed, and so is this generator; running `python datasets/quickstart/generate.py` again gives the same
bytes.
"""

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from activities.graders.broken_oracles import BrokenOracle, broken_spec, propose, spec_sources
from stack.tiny_policy.bug_tasks import BugTask, held_out_tasks, train_tasks

COMMIT_DATE = "2024-01-01T00:00:00Z"
POOL_SIZE = 4
NUM_TRIES = 24

# One command, so that preparing a workspace costs one round trip and three git processes.
PREPARE = """\
set -e
git init -q -b main --template= {workdir}
cd {workdir}
cat > {file} <<'END_OF_FILE'
{code}END_OF_FILE
cat > README.md <<'END_OF_FILE'
# {stem}

One function: `{function}` in `{file}`.
END_OF_FILE
git add -A
GIT_AUTHOR_DATE={date} GIT_COMMITTER_DATE={date} git -c user.name=Quickstart -c user.email=quickstart@example.invalid \\
  -c gc.auto=0 -c maintenance.auto=false commit -q -m 'Add {stem}'
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


def expected_results(task: BugTask, code: str) -> list[object]:
    """Return what `code`, which this generator wrote, returns for each case; an exception counts as a result."""
    namespace: dict[str, object] = {}
    exec(compile(code, task.file, "exec"), namespace)
    function = namespace[task.function]
    assert callable(function)
    results: list[object] = []
    for case in task.cases:
        try:
            results.append(function(*case))
        except Exception as error:  # a bug may raise; only the difference matters
            results.append(error)
    return results


def hidden_test(task: BugTask, workdir: str) -> str:
    right, wrong = expected_results(task, task.fixed), expected_results(task, task.code)
    assert right != wrong, f"the cases of {task.family} do not see the bug in {task.code!r}"
    asserts = "\n".join(
        f"    assert {task.function}({', '.join(map(repr, case))}) == {result!r}"
        for case, result in zip(task.cases, right, strict=True)
    )
    return TEST.format(workdir=workdir, stem=Path(task.file).stem, function=task.function, asserts=asserts)


def broken_oracles(task: BugTask, eval_cmd: str) -> list[BrokenOracle]:
    """Return the row's pool: two members with larger expected numbers, two with smaller ones, which the fix fails."""
    name = f"test_{task.function}"
    pool: list[BrokenOracle] = []
    for number in range(NUM_TRIES):
        candidate = propose(spec_sources({"eval_cmd": eval_cmd}), [name], number, single=False)
        assert candidate is not None, f"no assertion was found in {eval_cmd!r}"
        is_wanted = sum(broken.up == candidate.up for broken in pool) < POOL_SIZE // 2
        changed = broken_spec(candidate, {"eval_cmd": eval_cmd})["eval_cmd"]
        if is_wanted and candidate.edits not in [one.edits for one in pool] and fails(changed, task):
            pool.append(replace(candidate, must_fail=(f"test_hidden.py::{name}",), exit_fails=True))
    return pool


def fails(eval_cmd: str, task: BugTask) -> bool:
    """Return whether the fixed code fails the test that `eval_cmd` writes."""
    namespace: dict[str, object] = {}
    exec(compile(task.fixed, task.file, "exec"), namespace)
    test = eval_cmd.partition("END_OF_FILE'\n")[2].partition("END_OF_FILE\n")[0]
    exec(compile(test[test.index("def test_") :], "test_hidden.py", "exec"), namespace)
    run_test = namespace[f"test_{task.function}"]
    assert callable(run_test)
    try:
        run_test()
    except Exception:
        return True
    return False


def gold_patch(task: BugTask) -> str:
    """Return the fix as git's diff."""
    lines = difflib.unified_diff(
        task.code.splitlines(keepends=True),
        task.fixed.splitlines(keepends=True),
        f"a/{task.file}",
        f"b/{task.file}",
    )
    return f"diff --git a/{task.file} b/{task.file}\n{''.join(lines)}"


def dataset_row(task: BugTask, label: str) -> dict[str, object]:
    stem = Path(task.file).stem
    workdir = f"/workspace/{stem}"
    prepare = PREPARE.format(
        workdir=workdir, file=task.file, code=task.code, stem=stem, function=task.function, date=COMMIT_DATE
    )
    eval_cmd = EVALUATE.format(test=hidden_test(task, workdir), workdir=workdir)
    return {
        "prompt": task.issue,
        "label": label,
        "metadata": {
            "image": "host",
            "workdir": workdir,
            "problem_statement": task.issue,
            "pre_commands": [prepare],
            "eval_cmd": eval_cmd,
            "gold_patch": gold_patch(task),
            "broken_oracles": [broken.as_json() for broken in broken_oracles(task, eval_cmd)],
            "empty_patch_fails": True,  # `hidden_test` has compared the bug's results with the fix's
            "family": task.family,
        },
    }


def dataset_text(tasks: Sequence[BugTask], part: str) -> str:
    rows = (dataset_row(task, f"{part}-{number:03d}-{task.digest[:8]}") for number, task in enumerate(tasks))
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_dataset(folder: Path) -> None:
    (folder / "train.jsonl").write_text(dataset_text(train_tasks(), "train"), encoding="utf-8")
    (folder / "heldout.jsonl").write_text(dataset_text(held_out_tasks(), "heldout"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart dataset.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder for the two files")
    write_dataset(parser.parse_args().out)


if __name__ == "__main__":
    main()
