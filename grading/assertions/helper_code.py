"""Write `other_values.py` or `other_values.js` into a test's source, under names made of the source's own words.

The names differ from file to file and the code under test cannot know them, so that it cannot look for them in stack
frames or in the source. They follow from the source, so that the same task always gets the same broken oracles.
"""

import ast
import hashlib
import random
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from grading.assertions.site import far_text

_WORDS = re.compile(rb"[A-Za-z]{3,12}")
_SPARE_WORDS = ("given", "shown", "kept", "read", "found", "made", "taken", "first", "last", "held")
_JAVASCRIPT_NAMES = ("nearValue", "nearNumber", "nearText", "nearObject", "nearProperties")


@dataclass(slots=True, frozen=True)
class HelperCode:
    """The text to insert and the names in it: of the functions that return a neighbour of a value and one that refuses
    comparisons, and of a test's own list of reached assertions."""

    text: str
    near: str
    refused: str = ""
    reached: str = ""


def python_helper(source: bytes, up: bool) -> HelperCode:
    """Return the functions for a Python test of this source. `up`: numbers become larger, else smaller."""
    rng = _rng_of(source, up)
    names = _new_names(source, (*_python_names(), "reached_by_test"), rng)
    values = {"_STEP": str(1 if up else -1), "_PLACE": str(rng.randrange(1000)), "_WORD": repr(far_text(rng))}
    text = re.sub(r"\b[A-Za-z_]+\b", lambda match: names.get(match[0], values.get(match[0], match[0])), _python_code())
    return HelperCode(text + "\n\n", names["near_value"], names["refused_value"], names["reached_by_test"])


def javascript_helper(source: bytes, typed: bool, up: bool) -> HelperCode:
    """Return the functions for a JavaScript or TypeScript (`typed`) test of this source."""
    rng = _rng_of(source, up)
    names = _new_names(source, _JAVASCRIPT_NAMES, rng)
    code = (files("grading.assertions") / "other_values.js").read_text()
    code = code.replace("STEP", "1" if up else "-1").replace("PLACE", str(rng.randrange(1000)))
    if typed:
        code = re.sub(r"^(function \w+\()(\w+)\)", r"\1\2: any): any", code, flags=re.MULTILINE)
        code = code.replace("(one, place) =>", "(one: any, place: any) =>")
    code = re.sub(r"\b[A-Za-z]+\b", lambda match: names.get(match[0], match[0]), code)
    return HelperCode(f"\n{code}", names["nearValue"])


@cache
def _python_code() -> str:
    """Return the functions of `other_values.py` without annotations and docstrings."""
    tree = ast.parse((files("grading.assertions") / "other_values.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        function.returns = None
        for argument in (one for one in ast.walk(function.args) if isinstance(one, ast.arg)):
            argument.annotation = None
        if ast.get_docstring(function):
            del function.body[0]
    return "\n\n".join(map(ast.unparse, functions)).replace("_MAX_DEPTH", "8")


@cache
def _python_names() -> tuple[str, ...]:
    return tuple(re.findall(r"^def (\w+)", _python_code(), re.MULTILINE))


def _rng_of(source: bytes, up: bool) -> random.Random:
    return random.Random(hashlib.sha256(source + bytes([up])).digest())


def _new_names(source: bytes, old: tuple[str, ...], rng: random.Random) -> dict[str, str]:
    """Return a new name for each old one: two words of the source, joined, which the source does not have."""
    words = sorted({word.decode().lower() for word in _WORDS.findall(source)} | set(_SPARE_WORDS))
    names: dict[str, str] = {}
    while len(names) < len(old):
        name = f"_{rng.choice(words)}_{rng.choice(words)}"
        if name.encode() not in source and name not in names.values():
            names[old[len(names)]] = name
    return names
