"""Bugs in code of random shape, with issues in random words: the warm start's lesson in editing itself.

A policy of a few million parameters that sees ten families learns ten families. Here the words say nothing, so that it
must learn what is common to all: an issue ends with what should stand in the code, and something of the same kind
stands there now. Each of these functions is called with a name and draws a bug, as a family does.
"""

import random

from examples.tiny_policy.bug_tasks import FACTORS, PLAIN_NAMES, VARIABLES, PlantedBug, by_name, function_name

_TEXT = """
the this that it now here there must should has have to be with for from as an of on at by when then only not always
use used put write need needs want take give make let keep set call called change old good bad right wrong long
short big small new last next same each every one line part place thing case way side point form kind name number
word code file user test page book room house car tree road river city money time day week year hour night people
water fire light stone paper metal glass wood cloth bread sugar salt milk fruit plant animal bird fish
"""
WORDS = tuple(_TEXT.split())
CALLED = ("apply", "build", "compose", "derive", "fetch", "gather", "handle", "load", "int", "list", "set", "str")
HEAD_SHARE = 0.6
HEADS = ("It should", "The", "It", "This should", "Make it")
"""Openings of issues, as people write them. Without them in random issues, too, these words would name the families
that begin so."""
OPERATORS = ("+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==", "and", "or")
ASSIGNMENT_SHARE = 0.25
ASSIGNMENTS = ("+=", "-=", "*=", "//=", "%=")
NUMBERS = tuple(map(str, (*range(10), *FACTORS)))

NUMBER_SHAPES = (
    "{g}({a}, @@)", "{g}(@@, {a})", "{g}({a}) + @@", "{a} - @@", "{a} + @@", "({a}, @@)", "[@@, {a}]",
    "{g}({a}, {h}(@@))",
    "{g}({a})[@@]", "{a} if {b} else @@", "{g}({a}, {b}, @@)", "{g}({a}, limit_of={b}, n=@@)", "@@ + {a}", "{a} == @@",
    "{g}({h}({a}), @@)", "[{a}] * @@", "{{{a}: @@}}", "{a}[:@@]", "{g}(0, @@)",
)  # fmt: skip
TEXT_SHAPES = (
    "{g}(@@)", "{g}({a}, @@)", "{a} + @@", "@@ + {a}", "[{a}, @@]", "{a} == @@", "{g}(@@, {b})", "@@ in {a}",
    "({a}, @@)",
    "{g}({h}(@@), {a})", "{a} or @@", "@@ * {b}", "{{@@: {a}}}", "{{{a}: {g}(@@)}}", "{g}({a})[@@]", "{g}({a}[@@])",
    "{{{a}: 1, {b}: @@}}",
)  # fmt: skip
OPERATOR_SHAPES = ("{a}@@{b}", "{g}({a}@@{b})", "{g}({a})@@{b}", "({a}@@{b}, {a})", "[{a}@@{b}]", "{a}@@{g}({b})")
ASSIGNMENT_BODIES = ("    {a}@@{b}\n    return {a}\n", "    if {b}:\n        {a}@@1\n    return {a}\n")
NAME_SHAPES = ("{g}(@@)", "{g}({h}(@@))", "[@@]", "{g}(@@, 1)", "(@@, {g}(1))", "{g}(1)[@@]")
BODIES = (
    "    return {expression}\n",
    "    {c} = {expression}\n    return {c}\n",
    "    for i in {a}:\n        yield {expression}\n",
    "    if {b}:\n        return {expression}\n    return None\n",
)


def _draw(
    rng: random.Random, a: str, b: str, shapes: tuple[str, ...], options: list[str], bodies: tuple[str, ...] = BODIES
) -> PlantedBug:
    """Plant the second of `options` for the first."""
    c = rng.choice([name for name in VARIABLES if name not in (a, b)])
    g, h = rng.sample(CALLED, 2)
    expression = rng.choice(shapes).format(a=a, b=b, g=g, h=h)
    name = function_name(rng, PLAIN_NAMES)
    source = f"def {name}({a}, {b}):\n" + rng.choice(bodies).format(expression="@@", a=a, b=b, c=c)
    words = rng.choices(WORDS, k=rng.randint(2, 6))
    words[0] = rng.choice(HEADS) if rng.random() < HEAD_SHARE else words[0].capitalize()
    intent = " ".join([*words, options[0].strip(' "')]) + "."
    right, wrong, *others = (expression.replace("@@", option) for option in options)
    return PlantedBug(name, source, wrong, right, (right, wrong, *others), intent, ())


def random_number(rng: random.Random, a: str, b: str) -> PlantedBug:
    return _draw(rng, a, b, NUMBER_SHAPES, rng.sample(NUMBERS, 4))


def random_text(rng: random.Random, a: str, b: str) -> PlantedBug:
    words = rng.sample([name for name in VARIABLES if name not in (a, b)], 4)
    return _draw(rng, a, b, TEXT_SHAPES, [f'"{word}"' for word in words])


def random_operator(rng: random.Random, a: str, b: str) -> PlantedBug:
    if rng.random() < ASSIGNMENT_SHARE:
        return _draw(rng, a, b, ("@@",), [f" {one} " for one in rng.sample(ASSIGNMENTS, 4)], ASSIGNMENT_BODIES)
    return _draw(rng, a, b, OPERATOR_SHAPES, [f" {one} " for one in rng.sample(OPERATORS, 4)])


def random_name(rng: random.Random, a: str, b: str) -> PlantedBug:
    return _draw(rng, a, b, NAME_SHAPES, rng.sample([a, b], 2))


RANDOM_BUGS = by_name(random_number, random_text, random_operator, random_name)
