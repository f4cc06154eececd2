"""The curriculum's tasks: repositories of two source files, one of which has a bug, and a check that the agent can run.

The issue names the function that users call. The bug is in it, or in a function of the other file that it calls.
"""

import random
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from examples.curriculum.families import ALL_FAMILIES, NEW_FAMILIES, UNSEEN_FAMILIES, WARM_FAMILIES
from examples.curriculum.random_bugs import RANDOM_BUGS
from examples.tiny_policy.bug_tasks import (
    BUILTINS,
    FACTORS,
    FILE_STEMS,
    PLAIN_NAMES,
    TEXT_METHODS,
    VARIABLES,
    BugTask,
    PlantedBug,
    digest_of,
    draw_distinct,
    function_name,
    task_digests,
)
from examples.tiny_policy.expected_results import assertions
from examples.tiny_policy.simulated_shell import CHECK_FILE

# The box's own Python; -B leaves no cache files in the diff. Any error of a patched file is a failed check.
CHECK_SCRIPT = """\
#!/opt/ratchet/bin/python3 -BS
try:
    from {stem} import {function}

{asserts}
except Exception:
    print("FAIL")
    raise SystemExit(1)
print("OK")
"""
EDIT_PARTS = re.compile(r'"\w+"|-\d+|\w+\(| (?:[<>=!+*/%-]+|and|or|is|in) |\w+|[<>=!+*/%-]+|[^\w\s]|\s+')
KINDS_OF_TEXT: tuple[tuple[str, ...], ...] = (
    tuple(f" {operator} " for operator in ("and", "or", "is", "in", "==", "<", ">")),
    tuple(f" {operator} " for operator in ("+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==")),
    tuple(f" {operator} " for operator in ("+=", "-=", "*=", "/=", "//=")),
    ("-1", "0", "1", "2"),
    tuple(map(str, range(10))),
    tuple(map(str, FACTORS)),
    tuple(f"{name}(" for name in (*TEXT_METHODS, *BUILTINS, "sorted")),
    tuple(f'"{name}"' for name in VARIABLES),
)
"""Texts among which a fix can only be found by its issue or by trying."""
IMPORT = "from {stem} import {function}\n\n\n"

TRAIN_SEED, HELD_OUT_SEED = 30_241, 30_251
NUM_TRAIN = {"warm": 10, "new": 60}
NUM_HELD_OUT = {"warm": 2, "new": 7, "unseen": 10}
"""Tasks of each family, by its kind: `warm` families occur in the warm start; `new` ones only in the run's
training tasks; `unseen` ones in neither."""
FAMILIES_OF = {"random": RANDOM_BUGS, "warm": WARM_FAMILIES, "new": NEW_FAMILIES, "unseen": UNSEEN_FAMILIES}


def draw_repository(rng: random.Random, kind: str, family: str) -> BugTask:
    while (task := _draw(rng, kind, family)) is None:
        pass
    return task


def _draw(rng: random.Random, kind: str, family: str) -> BugTask | None:
    """Draw a task; None if its short edit would change more than the bug."""
    entry, helper = (f"{stem}.py" for stem in rng.sample(FILE_STEMS, 2))
    a, b = rng.sample(VARIABLES, 2)
    bug = FAMILIES_OF[kind][family](rng, a, b)
    planted, fixed = bug.source.replace("@@", bug.wrong, 1), bug.source.replace("@@", bug.right, 1)
    if rng.random() < 0.5:
        faulty, function, cases = entry, bug.function, bug.cases
        imported, beside = _correct_function(rng, bug.function)
        head = IMPORT.format(stem=Path(helper).stem, function=imported)
        files, fixed_files = ({entry: head + text, helper: beside} for text in (planted, fixed))
    else:
        faulty = helper
        while (function := function_name(rng, PLAIN_NAMES)) == bug.function:
            pass
        caller, num_arguments = _caller(function, bug, helper)
        cases = tuple(case for case in bug.cases if len(case) == num_arguments)
        files, fixed_files = ({entry: caller, helper: text} for text in (planted, fixed))
    old, new = short_edit(bug.wrong, bug.right, (a, b))
    if files[faulty].replace(old, new) != fixed_files[faulty]:
        return None
    fixed_source = joined_source(fixed_files, entry)
    asserts = assertions(fixed_source, function, cases)
    # What else could stand in the edit's place: texts of the same kind, or the family's other expressions.
    others = next((kind for kind in KINDS_OF_TEXT if old in kind and new in kind), bug.alternatives)
    check = {CHECK_FILE: CHECK_SCRIPT.format(stem=Path(entry).stem, function=function, asserts=asserts)}
    return BugTask(
        kind=kind,
        family=family,
        entry=entry,
        faulty=faulty,
        function=function,
        files=files | check,
        fixed_files=fixed_files | check,
        source=joined_source(files, entry),
        fixed_source=fixed_source,
        issue=f"{function} in {entry} is wrong. {bug.intent}",
        wrong=old,
        right=new,
        alternatives=tuple(one for one in others if one not in (old, new)),
        cases=cases,
        digest=digest_of(planted, new),
    )


def short_edit(wrong: str, right: str, parameters: tuple[str, str]) -> tuple[str, str]:
    """Return what differs between two expressions, in whole words and operators: `a[0]`, `a[-1]` give `0`, `-1`.

    Return the expressions if one only adds something, or if they differ in parameters, which occur elsewhere.
    """
    old, new = EDIT_PARTS.findall(wrong), EDIT_PARTS.findall(right)
    while old and new and old[0] == new[0]:
        old, new = old[1:], new[1:]
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    if not old or not new or set(parameters) & {*old, *new}:
        return wrong, right
    return "".join(old), "".join(new)


def _caller(function: str, bug: PlantedBug, helper: str) -> tuple[str, int]:
    """Return a file whose `function` hands its arguments on to the one with the bug, and their number.

    A parameter with a default value is left to it.
    """
    parameters = bug.source[bug.source.index("(") + 1 : bug.source.index("):")].split(", ")
    arguments = [name for name in parameters if name != "@@"]
    handed_on = ", ".join(arguments)
    head = IMPORT.format(stem=Path(helper).stem, function=bug.function)
    return f"{head}def {function}({handed_on}):\n    return {bug.function}({handed_on})\n", len(arguments)


def _correct_function(rng: random.Random, taken: str) -> tuple[str, str]:
    """Draw the name and source of a function of any family, of another name than `taken`."""
    while True:
        a, b = rng.sample(VARIABLES, 2)
        drawn = rng.choice(list(ALL_FAMILIES.values()))(rng, a, b)
        if drawn.function != taken:
            return drawn.function, drawn.source.replace("@@", drawn.right, 1)


def joined_source(files: Mapping[str, str], entry: str) -> str:
    """Return both files as one text without imports, the entry last."""
    names = sorted((name for name in files if name.endswith(".py")), key=lambda name: name == entry)
    lines = [line for name in names for line in files[name].splitlines(keepends=True)]
    return "".join(line for line in lines if not line.startswith("from "))


def draw_kinds(seed: int, numbers: Mapping[str, int], excluded: Collection[str] = ()) -> list[BugTask]:
    """Draw distinct tasks, `numbers[kind]` of each family of a kind, shuffled, none with a digest in `excluded`."""
    draws = (
        (partial(draw_repository, kind=kind, family=family), number)
        for kind, number in numbers.items()
        for family in FAMILIES_OF[kind]
    )
    return draw_distinct(seed, draws, excluded)


def held_out_repositories() -> list[BugTask]:
    return draw_kinds(HELD_OUT_SEED, NUM_HELD_OUT)


def train_repositories() -> list[BugTask]:
    return draw_kinds(TRAIN_SEED, NUM_TRAIN, task_digests(held_out_repositories()))
