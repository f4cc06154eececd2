"""Generated tasks: a function of a few lines with one wrong expression, and an issue that states the intent.

The quickstart dataset and the tiny policy's warm start draw from the same families and never use the same task.
"""

import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

FILE_STEMS = [
    "calc", "stats", "utils", "helpers", "shop", "billing", "report", "orders", "pricing", "ledger", "metrics",
    "scores", "games", "points", "units", "convert", "text", "names", "words", "lists", "tools", "core", "main", "lib",
    "account", "basket", "invoice", "payroll", "sensor", "weather", "travel", "budget",
]  # fmt: skip
VARIABLES = [
    "a", "b", "x", "y", "n", "m", "k", "p", "q", "u", "w", "left", "right", "first", "second", "low", "high", "base",
    "rate", "price", "cost", "size", "width", "height", "weight", "speed", "count", "score", "level", "total", "amount",
    "value", "tax", "fee", "start", "end",
]  # fmt: skip
FUNCTION_PREFIXES = ["get", "check", "find", "make", "run", "is", "do", "my", "new", "the"]
PLAIN_NAMES = ["value", "item", "result", "data", "entry", "field", "record", "step"]

ARITHMETIC = {
    "+": ("add", ["add", "plus", "combine", "join_up", "gain", "raise_by"]),
    "-": ("subtract", ["subtract", "minus", "drop", "reduce", "less_by", "cut"]),
    "*": ("multiply", ["multiply", "times", "scale", "grow", "area", "repeat_by"]),
}
TEXT_METHODS = {"upper": "upper case", "lower": "lower case", "title": "title case", "strip": "no outer spaces"}
BUILTINS = {"max": "largest", "min": "smallest", "sum": "sum", "len": "count"}
POSITIONS = {"0": "first", "1": "second", "2": "third", "-1": "last"}
FACTORS = (10, 12, 16, 20, 24, 30, 36, 40, 50, 60, 64, 80, 90)

TRAIN_SEED, HELD_OUT_SEED = 20_241, 20_251
NUM_TRAIN_PER_FAMILY, NUM_HELD_OUT_PER_FAMILY = 57, 11

Arguments = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class BugTask:
    """One bug in a repository. `entry` defines `function`, which the issue names; `faulty` is the file with the bug.

    Replacing `wrong` by `right` in `faulty` is the fix; `alternatives` are other texts that could stand there. `source`
    and `fixed_source` define `function` in one text, before and after the fix. `cases` are argument lists on which the
    fixed function is known to be right and the buggy one is wrong at least once. `digest` identifies the bug with its
    fix, independent of the files' names.
    """

    kind: str
    family: str
    entry: str
    faulty: str
    function: str
    files: Mapping[str, str]
    fixed_files: Mapping[str, str]
    source: str
    fixed_source: str
    issue: str
    wrong: str
    right: str
    alternatives: tuple[str, ...]
    cases: tuple[Arguments, ...]
    digest: str

    @property
    def stem(self) -> str:
        return Path(self.entry).stem

    @property
    def workdir(self) -> str:
        return f"/workspace/{self.stem}"


def digest_of(code: str, fix: str) -> str:
    return hashlib.sha256(f"{code}\0{fix}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A bug that a family draws: source with `@@` for the expression, the expressions, and the intent in words."""

    function: str
    source: str
    wrong: str
    right: str
    alternatives: Sequence[str]
    intent: str
    cases: tuple[Arguments, ...]


Family = Callable[[random.Random, str, str], PlantedBug]


def function_name(rng: random.Random, words: Sequence[str]) -> str:
    word = rng.choice(words)
    return word if rng.random() < 0.4 else f"{rng.choice(FUNCTION_PREFIXES)}_{word}"


def plant(
    rng: random.Random,
    name: str,
    parameters: str,
    options: Sequence[str],
    right: str,
    intent: str,
    cases: tuple[Arguments, ...],
    wrong: str | None = None,
    body: str = "return @@",
) -> PlantedBug:
    """Return a bug in the function `name`. `wrong` None: one of the other options is drawn."""
    source = f"def {name}({parameters}):\n    {body}\n"
    wrong = wrong or rng.choice([option for option in options if option != right])
    return PlantedBug(name, source, wrong, right, options, intent, cases)


def arithmetic(rng: random.Random, a: str, b: str) -> PlantedBug:
    operator = rng.choice("+-*")
    verb, words = ARITHMETIC[operator]
    name = function_name(rng, words)
    options = [f"{a} {each} {b}" for each in "+-*"]
    intent = f"It should {verb} {a} and {b}."
    return plant(rng, name, f"{a}, {b}", options, f"{a} {operator} {b}", intent, ((7, 2), (3, 5), (4, 9)))


def off_by_one(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["sum_to", "add_up", "tally"])
    inclusive = rng.random() < 0.5
    options = [f"range({a})", f"range({a} + 1)", f"range({a} - 1)"]
    body = f"{b} = 0\n    for i in @@:\n        {b} += i\n    return {b}"
    intent = f"It should sum up to {a} {'inclusive' if inclusive else 'exclusive'}."
    return plant(rng, name, a, options, options[inclusive], intent, ((3,), (5,), (8,)), body=body)


def default_value(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, PLAIN_NAMES)
    right, wrong = rng.sample(range(2, 10), 2)
    options = [f"{b}={number}" for number in range(2, 10)]
    body = f"return {a} {rng.choice('+*')} {b}"
    intent = f"The default for {b} should be {right}."
    cases = ((3,), (5,), (3, 11))
    return plant(rng, name, f"{a}, @@", options, f"{b}={right}", intent, cases, f"{b}={wrong}", body)


def constant(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["to_minutes", "convert", "scale_by", "weigh", "factor"])
    right, wrong = rng.sample(FACTORS, 2)
    options = [f"{a} * {factor}" for factor in FACTORS]
    intent = f"It should multiply by {right}."
    return plant(rng, name, a, options, f"{a} * {right}", intent, ((3,), (5,)), f"{a} * {wrong}")


def text_method(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["clean", "format", "label", "show"])
    method = rng.choice(list(TEXT_METHODS))
    options = [f"{a}.{each}()" for each in TEXT_METHODS]
    intent = f"The text should have {TEXT_METHODS[method]}."
    return plant(rng, name, a, options, f"{a}.{method}()", intent, ((" heLLo world ",), ("aB",), (" Xy",)))


def bool_operator(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["valid", "ready", "allowed", "open_now"])
    operator, quantity = rng.choice([("and", "both"), ("or", "either")])
    options = [f"{a} {each} {b}" for each in ("and", "or", "is", "in")]
    right, wrong = f"{a} {operator} {b}", f"{a} {'or' if operator == 'and' else 'and'} {b}"
    intent = f"It should need {quantity} of {a} and {b}."
    cases = ((True, False), (False, True), (True, True), (False, False))
    return plant(rng, name, f"{a}, {b}", options, right, intent, cases, wrong)


def builtin_function(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["best", "pick", "summary", "measure"])
    builtin = rng.choice(list(BUILTINS))
    options = [f"{each}({a})" for each in BUILTINS]
    intent = f"It should return the {BUILTINS[builtin]} of {a}."
    return plant(rng, name, a, options, f"{builtin}({a})", intent, (([3, 9, 4],), ([7, 1],)))


def position(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["head", "tail", "choose", "nth"])
    index = rng.choice(list(POSITIONS))
    options = [f"{a}[{each}]" for each in POSITIONS]
    intent = f"It should return the {POSITIONS[index]} of {a}."
    return plant(rng, name, a, options, f"{a}[{index}]", intent, (([3, 9, 4, 8],), ([7, 1, 5, 6],)))


def initial_value(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["fold", "collect", "accumulate"])
    operator, quantity, start = rng.choice([("+", "sum", "0"), ("*", "product", "1")])
    options = [f"{a} = {each}" for each in "0123"]
    body = f"@@\n    for i in {b}:\n        {a} {operator}= i\n    return {a}"
    intent = f"The {quantity} should start at {start}."
    return plant(rng, name, b, options, f"{a} = {start}", intent, (([3, 9, 4],), ([7, 1],)), body=body)


def by_name(*families: Family) -> dict[str, Family]:
    return {family.__name__: family for family in families}


FAMILIES = by_name(
    arithmetic, off_by_one, default_value, constant, text_method, bool_operator, builtin_function, position,
    initial_value,
)  # fmt: skip


def draw_task(rng: random.Random, family: str) -> BugTask:
    """Draw one task of a family. Its edit is right by construction; row generation checks that tests see the bug."""
    a, b = rng.sample(VARIABLES, 2)
    file = f"{rng.choice(FILE_STEMS)}.py"
    bug = FAMILIES[family](rng, a, b)
    code, fixed = bug.source.replace("@@", bug.wrong, 1), bug.source.replace("@@", bug.right, 1)
    return BugTask(
        kind="warm",
        family=family,
        entry=file,
        faulty=file,
        function=bug.function,
        files={file: code},
        fixed_files={file: fixed},
        source=code,
        fixed_source=fixed,
        issue=f"{bug.function} in {file} is wrong. {bug.intent}",
        wrong=bug.wrong,
        right=bug.right,
        alternatives=tuple(option for option in bug.alternatives if option != bug.right),
        cases=bug.cases,
        digest=digest_of(code, fixed),
    )


def draw_distinct(
    seed: int, draws: Iterable[tuple[Callable[[random.Random], BugTask], int]], excluded: Collection[str] = ()
) -> list[BugTask]:
    """Draw so many tasks by each function, shuffled, no two with one digest and none with a digest in `excluded`."""
    rng = random.Random(seed)
    drawn: dict[str, BugTask] = {}
    for draw, number in draws:
        wanted = len(drawn) + number
        while len(drawn) < wanted:
            task = draw(rng)
            if task.digest not in excluded:
                drawn.setdefault(task.digest, task)
    tasks = list(drawn.values())
    rng.shuffle(tasks)
    return tasks


def held_out_tasks() -> list[BugTask]:
    return draw_distinct(HELD_OUT_SEED, ((partial(draw_task, family=one), NUM_HELD_OUT_PER_FAMILY) for one in FAMILIES))


def train_tasks() -> list[BugTask]:
    draws = ((partial(draw_task, family=family), NUM_TRAIN_PER_FAMILY) for family in FAMILIES)
    return draw_distinct(TRAIN_SEED, draws, task_digests(held_out_tasks()))


def task_digests(tasks: Sequence[BugTask]) -> frozenset[str]:
    return frozenset(task.digest for task in tasks)
