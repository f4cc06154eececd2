"""Generated tasks: a function of a few lines with one wrong expression, and an issue that states the intent.

The quickstart dataset and the tiny policy's warm start draw from the same families and never use the same task.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

FILE_STEMS = [
    "calc",
    "stats",
    "utils",
    "helpers",
    "shop",
    "billing",
    "report",
    "orders",
    "pricing",
    "ledger",
    "metrics",
    "scores",
    "games",
    "points",
    "units",
    "convert",
    "text",
    "names",
    "words",
    "lists",
    "tools",
    "core",
    "main",
    "lib",
    "account",
    "basket",
    "invoice",
    "payroll",
    "sensor",
    "weather",
    "travel",
    "budget",
]
VARIABLES = [
    "a",
    "b",
    "x",
    "y",
    "n",
    "m",
    "k",
    "p",
    "q",
    "u",
    "w",
    "left",
    "right",
    "first",
    "second",
    "low",
    "high",
    "base",
    "rate",
    "price",
    "cost",
    "size",
    "width",
    "height",
    "weight",
    "speed",
    "count",
    "score",
    "level",
    "total",
    "amount",
    "value",
    "tax",
    "fee",
    "start",
    "end",
]
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
    """One bug. `wrong` and `right` are the expressions before and after the fix; `alternatives` are other wrong
    expressions.

    `cases` are argument lists on which the fixed function is known to be right and the buggy one is wrong at least
    once.
    """

    family: str
    file: str
    function: str
    code: str
    fixed: str
    issue: str
    wrong: str
    right: str
    alternatives: tuple[str, ...]
    cases: tuple[Arguments, ...]

    @property
    def files(self) -> dict[str, str]:
        return {self.file: self.code}

    @property
    def fixed_files(self) -> dict[str, str]:
        return {self.file: self.fixed}

    @property
    def digest(self) -> str:
        """Identifies the combination of names, bug and intent, independent of the file's name."""
        return hashlib.sha256(f"{self.code}\0{self.fixed}".encode()).hexdigest()


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


def other(rng: random.Random, options: Sequence[str], right: str) -> str:
    return rng.choice([option for option in options if option != right])


def arithmetic(rng: random.Random, a: str, b: str) -> PlantedBug:
    operator = rng.choice("+-*")
    verb, words = ARITHMETIC[operator]
    options = [f"{a} {each} {b}" for each in "+-*"]
    right = f"{a} {operator} {b}"
    name = function_name(rng, words)
    source = f"def {name}({a}, {b}):\n    return @@\n"
    return PlantedBug(
        name,
        source,
        other(rng, options, right),
        right,
        options,
        f"It should {verb} {a} and {b}.",
        ((7, 2), (3, 5), (4, 9)),
    )


def off_by_one(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["sum_to", "add_up", "tally"])
    inclusive = rng.random() < 0.5
    options = [f"range({a})", f"range({a} + 1)", f"range({a} - 1)"]
    right = options[1] if inclusive else options[0]
    source = f"def {name}({a}):\n    {b} = 0\n    for i in @@:\n        {b} += i\n    return {b}\n"
    intent = f"It should sum up to {a} {'inclusive' if inclusive else 'exclusive'}."
    return PlantedBug(name, source, other(rng, options, right), right, options, intent, ((3,), (5,), (8,)))


def default_value(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, PLAIN_NAMES)
    right, wrong = rng.sample(range(2, 10), 2)
    options = [f"{b}={number}" for number in range(2, 10)]
    source = f"def {name}({a}, @@):\n    return {a} {rng.choice('+*')} {b}\n"
    intent = f"The default for {b} should be {right}."
    return PlantedBug(name, source, f"{b}={wrong}", f"{b}={right}", options, intent, ((3,), (5,), (3, 11)))


def constant(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["to_minutes", "convert", "scale_by", "weigh", "factor"])
    right, wrong = rng.sample(FACTORS, 2)
    options = [f"{a} * {factor}" for factor in FACTORS]
    source = f"def {name}({a}):\n    return @@\n"
    return PlantedBug(
        name, source, f"{a} * {wrong}", f"{a} * {right}", options, f"It should multiply by {right}.", ((3,), (5,))
    )


def text_method(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["clean", "format", "label", "show"])
    method = rng.choice(list(TEXT_METHODS))
    options = [f"{a}.{each}()" for each in TEXT_METHODS]
    right = f"{a}.{method}()"
    source = f"def {name}({a}):\n    return @@\n"
    cases = ((" heLLo world ",), ("aB",), (" Xy",))
    return PlantedBug(
        name, source, other(rng, options, right), right, options, f"The text should have {TEXT_METHODS[method]}.", cases
    )


def bool_operator(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["valid", "ready", "allowed", "open_now"])
    operator, quantity = rng.choice([("and", "both"), ("or", "either")])
    options = [f"{a} {each} {b}" for each in ("and", "or", "is", "in")]
    right, wrong = f"{a} {operator} {b}", f"{a} {'or' if operator == 'and' else 'and'} {b}"
    source = f"def {name}({a}, {b}):\n    return @@\n"
    cases = ((True, False), (False, True), (True, True), (False, False))
    return PlantedBug(name, source, wrong, right, options, f"It should need {quantity} of {a} and {b}.", cases)


def builtin_function(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["best", "pick", "summary", "measure"])
    builtin = rng.choice(list(BUILTINS))
    options = [f"{each}({a})" for each in BUILTINS]
    right = f"{builtin}({a})"
    source = f"def {name}({a}):\n    return @@\n"
    intent = f"It should return the {BUILTINS[builtin]} of {a}."
    return PlantedBug(name, source, other(rng, options, right), right, options, intent, (([3, 9, 4],), ([7, 1],)))


def position(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["head", "tail", "choose", "nth"])
    index = rng.choice(list(POSITIONS))
    options = [f"{a}[{each}]" for each in POSITIONS]
    right = f"{a}[{index}]"
    source = f"def {name}({a}):\n    return @@\n"
    intent = f"It should return the {POSITIONS[index]} of {a}."
    return PlantedBug(
        name, source, other(rng, options, right), right, options, intent, (([3, 9, 4, 8],), ([7, 1, 5, 6],))
    )


def initial_value(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["fold", "collect", "accumulate"])
    operator, quantity, start = rng.choice([("+", "sum", "0"), ("*", "product", "1")])
    options = [f"{a} = {each}" for each in "0123"]
    right = f"{a} = {start}"
    source = f"def {name}({b}):\n    @@\n    for i in {b}:\n        {a} {operator}= i\n    return {a}\n"
    intent = f"The {quantity} should start at {start}."
    return PlantedBug(name, source, other(rng, options, right), right, options, intent, (([3, 9, 4],), ([7, 1],)))


FAMILIES: dict[str, Family] = {
    "arithmetic": arithmetic,
    "off_by_one": off_by_one,
    "default_value": default_value,
    "constant": constant,
    "text_method": text_method,
    "bool_operator": bool_operator,
    "builtin_function": builtin_function,
    "position": position,
    "initial_value": initial_value,
}


def draw_task(rng: random.Random, family: str) -> BugTask:
    """Draw one task of a family. The edit is correct by construction; row generation checks that the tests detect the
    bug.
    """
    a, b = rng.sample(VARIABLES, 2)
    file = f"{rng.choice(FILE_STEMS)}.py"
    bug = FAMILIES[family](rng, a, b)
    return BugTask(
        family=family,
        file=file,
        function=bug.function,
        code=bug.source.replace("@@", bug.wrong, 1),
        fixed=bug.source.replace("@@", bug.right, 1),
        issue=f"{bug.function} in {file} is wrong. {bug.intent}",
        wrong=bug.wrong,
        right=bug.right,
        alternatives=tuple(option for option in bug.alternatives if option != bug.right),
        cases=bug.cases,
    )


class _HasDigest(Protocol):
    """A drawn task, which is compared by its digest."""

    @property
    def digest(self) -> str: ...


_Drawn = TypeVar("_Drawn", bound=_HasDigest)


def draw_distinct(draw: Callable[[], _Drawn], number: int, taken: set[str]) -> list[_Drawn]:
    """Draw so many tasks whose digests are not in `taken`, which gets them."""
    drawn: list[_Drawn] = []
    while len(drawn) < number:
        task = draw()
        if task.digest not in taken:
            taken.add(task.digest)
            drawn.append(task)
    return drawn


def draw_balanced(seed: int, num_per_family: int, excluded: frozenset[str] = frozenset()) -> list[BugTask]:
    """Draw distinct tasks, equally many per family, shuffled, none with a digest in `excluded`."""
    rng = random.Random(seed)
    taken = set(excluded)
    tasks: list[BugTask] = []
    for family in FAMILIES:
        tasks += draw_distinct(partial(draw_task, rng, family), num_per_family, taken)
    rng.shuffle(tasks)
    return tasks


def held_out_tasks() -> list[BugTask]:
    return draw_balanced(HELD_OUT_SEED, NUM_HELD_OUT_PER_FAMILY)


def train_tasks() -> list[BugTask]:
    return draw_balanced(TRAIN_SEED, NUM_TRAIN_PER_FAMILY, task_digests(held_out_tasks()))


def task_digests(tasks: Sequence[BugTask]) -> frozenset[str]:
    return frozenset(task.digest for task in tasks)
