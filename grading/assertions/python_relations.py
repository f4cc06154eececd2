"""Find what a Python test's assertions relate: values that must be equal, and pairs with another relation."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from grading.assertions.python_syntax import call_name, is_literal
from grading.assertions.site import says_equality

_MAGNITUDES = ("abs", "fabs", "absolute", "norm")
_SUMMARIES = ("max", "amax", "sum", "mean", "float", "total_seconds")
"""Calls around or inside an absolute value that keep the order of absolute values."""
_RELATIONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.Is)
_ORDERS = ("assertLess", "assertLessEqual", "assertGreater", "assertGreaterEqual")
_VAGUE = re.compile(
    "less|lower|small|great|more|most|least|above|below|under|over|than|between|within|range|subset|superset"
    "|contain|include|part|start|end|before|after|max|min|in(?=[A-Z_]|$)",
    re.IGNORECASE,
)
"""Words of an assertion that is unknown and may be an order or a search: another value may satisfy one solution."""


class Pair(NamedTuple):
    """Two values with a relation that an assertion requires. `is_certain`: each run that passes has evaluated them.
    `is_equal`: they must be equal, or not further apart than `tolerance` if that is given. `expected`: the only one of
    the two sides that may be changed, None if either may be."""

    sides: list[ast.expr]
    is_certain: bool
    is_equal: bool = False
    tolerance: ast.expr | None = None
    expected: int | None = None


def equal_pairs(test: ast.expr, is_certain: bool) -> Iterator[Pair]:
    """Yield the values that must be equal if the condition holds. Of an array's items there may be none, so that two
    neighbours may be right, too."""
    for part, certain, is_array in _conditions(test, is_certain):
        if isinstance(part, ast.Compare) and all(isinstance(op, ast.Eq) for op in part.ops):
            yield Pair([part.left, *part.comparators][-2:], certain, not is_array)
        elif isinstance(part, ast.Call) and says_equality(call_name(part)):
            yield Pair(part.args[:2] if len(part.args) == 2 else [], certain, not is_array)


def related_pairs(test: ast.expr, is_certain: bool) -> Iterator[Pair]:
    """Yield pairs of values with another relation that must hold; one such as `!=` and `not in` is none."""
    for part, certain, is_array in _conditions(test, is_certain):
        if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], _RELATIONS):
            sides = [part.left, *part.comparators]
            bounded, bound = sides if isinstance(part.ops[0], ast.Lt | ast.LtE) else sides[::-1]
            yield from [Pair(sides, certain)] if is_array else _bounded(bounded, bound, certain)
        elif isinstance(part, ast.Call) and call_name(part) == "isinstance":
            yield Pair(part.args[:2], certain, expected=1)
        elif isinstance(part, ast.Call) and call_name(part) in ("isclose", "allclose"):
            yield Pair(part.args[:2], certain)
        elif isinstance(part, ast.Call):
            yield from _text_pairs(part, certain)


def asserted_pairs(call: ast.Call, is_certain: bool) -> Iterator[Pair]:
    """Yield the two values that a method of `unittest.TestCase`, or another assertion, relates."""
    sides = call.args[:2]
    name = call_name(call)
    if len(sides) == 2 and name in _ORDERS:
        bounded, bound = sides if "Less" in name else sides[::-1]
        yield from _bounded(bounded, bound, is_certain)
    elif name == "assertAlmostEqual":
        tolerance = _tolerance(call)
        yield Pair(sides, is_certain, tolerance is not None, tolerance)
    elif name in ("assertIsInstance", "assertRegex"):
        yield Pair(sides, is_certain, expected=1)
    elif not any(isinstance(side, ast.Constant) and isinstance(side.value, bool) for side in sides):  # a switch
        yield Pair(sides, is_certain)


def is_vague(name: str) -> bool:
    """Return whether the name of a call says that it may be an order or a search."""
    return _VAGUE.search(name) is not None


def _bounded(node: ast.expr, bound: ast.expr, is_certain: bool) -> Iterator[Pair]:
    """Yield what `node < bound` relates. The bound of an absolute value is a tolerance, which stays as it is."""
    difference = _difference(node, bound, is_certain)
    if difference is not None:
        yield difference
    elif not any(isinstance(one, ast.Call) and call_name(one) in _MAGNITUDES for one in ast.walk(node)):
        yield Pair([node, bound], is_certain)


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


def _difference(node: ast.expr, tolerance: ast.expr, is_certain: bool) -> Pair | None:
    """Return `a` and `b` of `abs(a - b)`, which is less than the tolerance, None for another bounded value.

    Another tolerance would fail any product, also one whose values hide their difference. In a comprehension they may
    never be evaluated.
    """
    has_magnitude = False
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
        return Pair([node.left, node.right], is_certain, True, tolerance)
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
        yield Pair([searched, wanted], is_certain, expected=1)


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
