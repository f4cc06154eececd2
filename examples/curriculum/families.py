"""The curriculum's families of bugs: those of the warm start, those that only the run trains, those only evaluated.

Correct functions of all families stand in the files of the warm start, so that the policy has read their operators. An
issue of these families, a bug or its fix it has not.
"""

import random

from examples.tiny_policy.bug_tasks import FACTORS, FAMILIES, VARIABLES, PlantedBug, by_name, function_name, plant

COMPARISONS = {"<": "less than", "<=": "at most", ">": "more than", ">=": "at least"}
STEPS = ("2", "3", "4", "5", "6")


def swapped(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["difference", "gap", "change"])
    options = [f"{a} - {b}", f"{b} - {a}"]
    right = rng.choice(options)
    first, second = (a, b) if right == options[0] else (b, a)
    intent = f"It should subtract {second} from {first}."
    return plant(rng, name, f"{a}, {b}", options, right, intent, ((7, 2), (3, 5), (4, 9)))


def wrong_name(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["text_of", "shown", "written"])
    wanted = rng.choice([a, b])
    options = [f"str({a})", f"str({b})"]
    return plant(
        rng, name, f"{a}, {b}", options, f"str({wanted})", f"It should show {wanted}.", ((7, 2), (3, 5), (4, 9))
    )


def comparison(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["below", "above", "fits", "in_order"])
    operator = rng.choice(list(COMPARISONS))
    options = [f"{a} {each} {b}" for each in COMPARISONS]
    intent = f"It should say whether {a} is {COMPARISONS[operator]} {b}."
    return plant(rng, name, f"{a}, {b}", options, f"{a} {operator} {b}", intent, ((1, 2), (5, 5), (9, 4)))


def augmented(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["running", "combined", "rolled_up"])
    operator, verb = rng.choice([("+", "add every i to"), ("-", "take every i from"), ("*", "multiply every i into")])
    options = [f"{a} {each}= i" for each in "+-*"]
    body = f"{a} = 1\n    for i in {b}:\n        @@\n    return {a}"
    cases = (([3, 9, 4],), ([7, 2],))
    return plant(rng, name, b, options, f"{a} {operator}= i", f"It should {verb} {a}.", cases, body=body)


def range_step(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["every", "skip", "marks"])
    step, other = rng.sample(STEPS, 2)
    options = [f"range(0, {a}, {each})" for each in STEPS]
    right, wrong = f"range(0, {a}, {step})", f"range(0, {a}, {other})"
    intent = f"It should count in steps of {step}."
    return plant(rng, name, a, options, right, intent, ((20,), (9,)), wrong, "return list(@@)")


def text_constant(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["title_of", "kind", "unit_of"])
    words = rng.sample([word for word in VARIABLES if word != a], 4)
    right, wrong, *_ = options = [f'"{word}"' for word in words]
    intent = f"The text should be {words[0]}."
    return plant(rng, name, a, options, right, intent, ((3,), (5,)), wrong, f"return {{{a}: @@}}")


def limit(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["capped", "bounded", "at_most"])
    right, wrong = rng.sample(FACTORS, 2)
    options = [f"min({a}, {factor})" for factor in FACTORS]
    intent = f"The limit should be {right}."
    return plant(rng, name, a, options, f"min({a}, {right})", intent, ((1000,), (5,)), f"min({a}, {wrong})")


def key(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["read", "lookup", "part_of"])
    words = rng.sample([word for word in VARIABLES if word != a], 4)
    right, wrong, *_ = options = [f'{a}["{word}"]' for word in words]
    values = {word: number for number, word in enumerate(sorted(words), 2)}
    return plant(rng, name, a, options, right, f"It should read the key {words[0]}.", ((values,),), wrong)


def slice_start(rng: random.Random, a: str, _b: str) -> PlantedBug:
    name = function_name(rng, ["rest", "without", "later"])
    right, wrong = rng.sample("1234", 2)
    options = [f"{a}[{start}:]" for start in "1234"]
    intent = f"It should leave out the first {right}."
    cases = (([3, 9, 4, 8, 6],), ([7, 1, 5, 2, 0, 4],))
    return plant(rng, name, a, options, f"{a}[{right}:]", intent, cases, f"{a}[{wrong}:]")


def division(rng: random.Random, a: str, b: str) -> PlantedBug:
    name = function_name(rng, ["share", "split_up", "portion"])
    operator, words = rng.choice([("/", "divide exactly"), ("//", "divide without a rest"), ("%", "give the rest of")])
    options = [f"{a} {each} {b}" for each in ("/", "//", "%")]
    intent = f"It should {words} {a} by {b}."
    return plant(rng, name, f"{a}, {b}", options, f"{a} {operator} {b}", intent, ((7, 2), (11, 4)))


WARM_FAMILIES = FAMILIES
NEW_FAMILIES = by_name(swapped, wrong_name, comparison, augmented, range_step, text_constant)
UNSEEN_FAMILIES = by_name(limit, key, slice_start, division)
ALL_FAMILIES = WARM_FAMILIES | NEW_FAMILIES | UNSEEN_FAMILIES
