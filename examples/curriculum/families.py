"""The curriculum's families of bugs: those of the warm start, those that only the run trains, those only evaluated.

Correct functions of all families stand in the files of the warm start, so that the policy has read their operators. An
issue of these families, a bug or its fix it has not.
"""

import random

from examples.tiny_policy.bug_tasks import FACTORS, FAMILIES, VARIABLES, Family, PlantedBug, function_name, other

COMPARISONS = {"<": "less than", "<=": "at most", ">": "more than", ">=": "at least"}
STEPS = ("2", "3", "4", "5", "6")


def swapped(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["difference", "gap", "change"])
    options = [f"{a} - {b}", f"{b} - {a}"]
    right = rng.choice(options)
    first, second = (a, b) if right == options[0] else (b, a)
    source = f"def {name}({a}, {b}):\n    return @@\n"
    intent = f"It should subtract {second} from {first}."
    return PlantedBug(name, source, other(rng, options, right), right, options, intent, ((7, 2), (3, 5), (4, 9)))


def wrong_name(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["text_of", "shown", "written"])
    wanted = rng.choice([a, b])
    options, right = [f"str({a})", f"str({b})"], f"str({wanted})"
    source = f"def {name}({a}, {b}):\n    return @@\n"
    intent = f"It should show {wanted}."
    return PlantedBug(name, source, other(rng, options, right), right, options, intent, ((7, 2), (3, 5), (4, 9)))


def comparison(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["below", "above", "fits", "in_order"])
    operator = rng.choice(list(COMPARISONS))
    options = [f"{a} {each} {b}" for each in COMPARISONS]
    right = f"{a} {operator} {b}"
    source = f"def {name}({a}, {b}):\n    return @@\n"
    intent = f"It should say whether {a} is {COMPARISONS[operator]} {b}."
    return PlantedBug(name, source, other(rng, options, right), right, options, intent, ((1, 2), (5, 5), (9, 4)))


def augmented(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["running", "combined", "rolled_up"])
    operator, verb = rng.choice([("+", "add every i to"), ("-", "take every i from"), ("*", "multiply every i into")])
    options = [f"{a} {each}= i" for each in "+-*"]
    right = f"{a} {operator}= i"
    source = f"def {name}({b}):\n    {a} = 1\n    for i in {b}:\n        @@\n    return {a}\n"
    intent = f"It should {verb} {a}."
    return PlantedBug(name, source, other(rng, options, right), right, options, intent, (([3, 9, 4],), ([7, 2],)))


def range_step(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["every", "skip", "marks"])
    right, wrong = rng.sample(STEPS, 2)
    options = [f"range(0, {a}, {step})" for step in STEPS]
    source = f"def {name}({a}):\n    return list(@@)\n"
    intent = f"It should count in steps of {right}."
    return PlantedBug(
        name, source, f"range(0, {a}, {wrong})", f"range(0, {a}, {right})", options, intent, ((20,), (9,))
    )


def text_constant(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["title_of", "kind", "unit_of"])
    words = rng.sample([word for word in VARIABLES if word != a], 4)
    options = [f'"{word}"' for word in words]
    source = f"def {name}({a}):\n    return {{{a}: @@}}\n"
    intent = f"The text should be {words[0]}."
    return PlantedBug(name, source, options[1], options[0], options, intent, ((3,), (5,)))


def limit(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["capped", "bounded", "at_most"])
    right, wrong = rng.sample(FACTORS, 2)
    options = [f"min({a}, {factor})" for factor in FACTORS]
    source = f"def {name}({a}):\n    return @@\n"
    intent = f"The limit should be {right}."
    return PlantedBug(name, source, f"min({a}, {wrong})", f"min({a}, {right})", options, intent, ((1000,), (5,)))


def key(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["read", "lookup", "part_of"])
    words = rng.sample([word for word in VARIABLES if word != a], 4)
    options = [f'{a}["{word}"]' for word in words]
    source = f"def {name}({a}):\n    return @@\n"
    intent = f"It should read the key {words[0]}."
    values = {word: number for number, word in enumerate(sorted(words), 2)}
    return PlantedBug(name, source, options[1], options[0], options, intent, ((values,),))


def slice_start(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["rest", "without", "later"])
    right, wrong = rng.sample("1234", 2)
    options = [f"{a}[{start}:]" for start in "1234"]
    source = f"def {name}({a}):\n    return @@\n"
    intent = f"It should leave out the first {right}."
    cases = (([3, 9, 4, 8, 6],), ([7, 1, 5, 2, 0, 4],))
    return PlantedBug(name, source, f"{a}[{wrong}:]", f"{a}[{right}:]", options, intent, cases)


def division(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["share", "split_up", "portion"])
    operator, words = rng.choice([("/", "divide exactly"), ("//", "divide without a rest"), ("%", "give the rest of")])
    options = [f"{a} {each} {b}" for each in ("/", "//", "%")]
    right = f"{a} {operator} {b}"
    source = f"def {name}({a}, {b}):\n    return @@\n"
    intent = f"It should {words} {a} by {b}."
    return PlantedBug(name, source, other(rng, options, right), right, options, intent, ((7, 2), (11, 4)))


WARM_FAMILIES: dict[str, Family] = FAMILIES
NEW_FAMILIES: dict[str, Family] = {
    "swapped": swapped,
    "wrong_name": wrong_name,
    "comparison": comparison,
    "augmented": augmented,
    "range_step": range_step,
    "text_constant": text_constant,
}
UNSEEN_FAMILIES: dict[str, Family] = {"limit": limit, "key": key, "slice_start": slice_start, "division": division}
ALL_FAMILIES: dict[str, Family] = WARM_FAMILIES | NEW_FAMILIES | UNSEEN_FAMILIES
