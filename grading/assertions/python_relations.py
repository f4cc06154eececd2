"""Find what a Python test's assertions relate, and how each side can be changed so that no correct solution passes."""

import ast
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from grading.assertions.python_syntax import LITERAL_CALLS, call_name, is_literal
from grading.assertions.site import says_equality

Change = Literal["near", "items", "far", "array", "outside", "above", "below", "sought", "members", "refused"]
"""The change of an expected value, made by the function `<change>_value` of `other_values.py`."""
_MAGNITUDES = ("abs", "fabs", "absolute", "norm")
_SUMMARIES = ("max", "amax", "sum", "mean", "float", "total_seconds")
"""Calls around or inside an absolute value that keep the order of absolute values."""
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_METHODS: dict[str, type[ast.cmpop]] = {
    "assertLess": ast.Lt,
    "assertLessEqual": ast.LtE,
    "assertGreater": ast.Gt,
    "assertGreaterEqual": ast.GtE,
    "assertIn": ast.In,
    "assertIs": ast.Is,
}
_VAGUE = re.compile(
    "less|lower|small|great|more|most|least|above|below|under|over|than|between|within|range|subset|superset"
    "|contain|include|part|start|end|before|after|max|min|in(?=[A-Z_]|$)",
    re.IGNORECASE,
)
"""Words of an assertion that is unknown and may be an order or a search: another value may satisfy one solution."""
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
_CONTAINERS = (*_DISPLAYS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.JoinedStr)


class Pair(NamedTuple):
    """Two values with a relation that an assertion requires. `is_certain`: each run that passes has evaluated them.
    `changes`: for each side how it can be changed, None if it cannot. `tolerance`: how far apart they may be, of the
    change `outside`.
    """

    sides: list[ast.expr]
    is_certain: bool
    changes: tuple[Change | None, Change | None] = ("far", "far")
    tolerance: ast.expr | None = None


def equal_pairs(test: ast.expr, is_certain: bool) -> Iterator[Pair]:
    """Yield the values that must be equal if the condition holds."""
    for part, certain, is_array in _conditions(test, is_certain):
        changes: tuple[Change, Change] = ("items", "items") if is_array else ("near", "near")
        if isinstance(part, ast.Compare) and all(isinstance(op, ast.Eq) for op in part.ops):
            yield Pair([part.left, *part.comparators][-2:], certain, changes)
        elif isinstance(part, ast.Call) and says_equality(call_name(part)):
            yield Pair(part.args[:2] if len(part.args) == 2 else [], certain, changes)


def related_pairs(test: ast.expr, is_certain: bool) -> Iterator[Pair]:
    """Yield pairs of values with another relation that must hold; one such as `!=` and `not in` is none."""
    for part, certain, is_array in _conditions(test, is_certain):
        if isinstance(part, ast.Compare) and len(part.ops) == 1:
            yield from _relation([part.left, *part.comparators], type(part.ops[0]), certain, is_array)
        elif isinstance(part, ast.Call) and call_name(part) == "isinstance":
            yield Pair(part.args[:2], certain, (None, "far"))
        elif isinstance(part, ast.Call) and call_name(part) in ("isclose", "allclose"):
            yield Pair(part.args[:2], certain, ("array", "array"))
        elif isinstance(part, ast.Call):
            yield from _text_pairs(part, certain)


def asserted_pairs(call: ast.Call, is_certain: bool) -> Iterator[Pair]:
    """Yield the two values that a method of `unittest.TestCase`, or another assertion, relates."""
    sides = call.args[:2]
    name = call_name(call)
    if name in _METHODS:
        yield from _relation(sides, _METHODS[name], is_certain)
    elif name == "assertAlmostEqual":
        tolerance = _tolerance(call)
        yield Pair(sides, is_certain) if tolerance is None else _near_pair(sides, is_certain, tolerance)
    elif name in ("assertIsInstance", "assertRegex"):
        yield Pair(sides, is_certain, (None, "far"))
    elif re.search("close|almost", name, re.IGNORECASE):
        yield Pair(sides, is_certain, ("array", "array"))
    elif is_vague(name):
        yield Pair(sides, is_certain, ("refused", "refused"))
    elif not any(isinstance(side, ast.Constant) and isinstance(side.value, bool) for side in sides):  # a switch
        yield Pair(sides, is_certain)


def is_vague(name: str) -> bool:
    """Return whether the name of a call says that it may be an order or a search."""
    return _VAGUE.search(name) is not None


def _near_pair(sides: list[ast.expr], is_certain: bool, tolerance: ast.expr) -> Pair:
    return Pair(sides, is_certain, ("outside", "outside"), tolerance)


def _relation(
    sides: list[ast.expr], relation: type[ast.cmpop], is_certain: bool, is_array: bool = False
) -> Iterator[Pair]:
    """Yield the two sides of a comparison. `is_array`: it holds for an array without items, too."""
    if relation is ast.Is:
        yield Pair(sides, is_certain)
    elif relation is ast.In:
        members: Change | None = None if _is_text(sides[1]) else "members"
        yield Pair(sides, is_certain, ("sought", members))
    elif relation in _ORDER:
        yield from _order(sides, relation, is_certain, is_array)


def _order(sides: list[ast.expr], relation: type[ast.cmpop], is_certain: bool, is_array: bool) -> Iterator[Pair]:
    """Yield the values of `<` and such: nothing is above an infinite number, also no infinite result.

    Texts, sets and other containers are left alone: an empty one is below every other.
    """
    bounded, bound = sides if relation in (ast.Lt, ast.LtE) else sides[::-1]
    difference = _difference(bounded, bound)
    if difference is not None:
        difference = difference._replace(is_certain=is_certain and difference.is_certain)
        yield difference._replace(changes=("refused", "refused"), tolerance=None) if is_array else difference
    elif not _has_magnitude(bounded):  # else the bound is a tolerance: without it any product fails
        strict: tuple[Change, Change] = ("below", "above") if relation is ast.Gt else ("above", "below")
        changes: tuple[Change, Change] = ("refused", "refused")
        if relation in (ast.Lt, ast.Gt) and not is_array:
            changes = strict
        first, second = (None if _is_container(side) else change for side, change in zip(sides, changes, strict=True))
        yield Pair(sides, is_certain, (first, second))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_container(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return call_name(node) in LITERAL_CALLS and call_name(node) not in ("Decimal", "Fraction")
    return isinstance(node, _CONTAINERS) or _is_text(node)


def _has_magnitude(node: ast.expr) -> bool:
    return any(isinstance(one, ast.Call) and call_name(one) in _MAGNITUDES for one in ast.walk(node))


def _tolerance(call: ast.Call) -> ast.expr | None:
    """Return how far apart the values of `assertAlmostEqual` may be, None if that is not clear."""
    given: dict[str | None, ast.expr] = {one.arg: one.value for one in call.keywords}
    given |= zip(("places", "msg", "delta"), call.args[2:], strict=False)
    if "delta" in given:
        return given["delta"]
    places = given.get("places", ast.Constant(7))
    if isinstance(places, ast.Constant) and isinstance(places.value, int):
        return ast.Constant(10.0**-places.value)
    return None


def _difference(node: ast.expr, tolerance: ast.expr) -> Pair | None:
    """Return `a` and `b` of `abs(a - b)`, which is less than the tolerance, None for another bounded value.

    Another tolerance would fail any product, also one whose values hide their difference. In a comprehension they may
    never be evaluated.
    """
    has_magnitude = False
    is_certain = True
    while isinstance(node, ast.Call | ast.GeneratorExp | ast.ListComp):
        if not isinstance(node, ast.Call):
            node = node.elt
            is_certain = False
            continue
        name = call_name(node)
        inner = node.args[0] if node.args else getattr(node.func, "value", None)
        if inner is None or name not in (*_MAGNITUDES, *_SUMMARIES):
            return None
        has_magnitude = has_magnitude or name in _MAGNITUDES
        node = inner
    if has_magnitude and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return _near_pair([node.left, node.right], is_certain, tolerance)
    return None


def _text_pairs(call: ast.Call, is_certain: bool) -> Iterator[Pair]:
    """Yield what a method of texts or sets, or a search in a text, has to find, with what it is looked for in.

    Only a literal: any other argument may be the product's, and another value of it may be right for one solution.
    """
    name = call_name(call)
    owner = getattr(call.func, "value", None)
    if len(call.args) == 1 and owner is not None and name in ("startswith", "endswith", "issuperset", "issubset"):
        wanted, searched = (owner, call.args[0]) if name == "issubset" else (call.args[0], owner)
    elif len(call.args) >= 2 and name in ("match", "search", "fullmatch") and call_name(owner or call) == "re":
        wanted, searched = call.args[:2]
    else:
        return
    if is_literal(wanted) and not is_literal(searched):
        yield Pair([searched, wanted], is_certain, (None, "sought"))


class _Condition(NamedTuple):
    test: ast.expr
    is_certain: bool
    is_array: bool


def _conditions(test: ast.expr, is_certain: bool, is_array: bool = False) -> Iterator[_Condition]:
    """Yield the conditions that all hold if `test` does, also those of each item of `all(...)`.

    `is_array`: the condition is one of an array's items, of which there may be none.
    """
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for value in test.values:
            yield from _conditions(value, is_certain, is_array)
    elif isinstance(test, ast.Call) and call_name(test) == "all":
        inside = test.args[0] if test.args else getattr(test.func, "value", None)
        if isinstance(inside, ast.GeneratorExp | ast.ListComp):
            yield from _conditions(inside.elt, False, is_array)
        elif inside is not None:
            yield from _conditions(inside, is_certain, True)
    else:
        yield _Condition(test, is_certain, is_array)
