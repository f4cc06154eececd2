"""What the syntax tree of a Python test tells: places of nodes, statements that always run, expected values."""

import ast
import builtins
import codecs
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from activities.graders.assertions.site import says_equality

Function = ast.FunctionDef | ast.AsyncFunctionDef
_LITERAL_CALLS = ("set", "frozenset", "tuple", "list", "dict", "Decimal", "Fraction", "OrderedDict")
_RELATIONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.Is)
_LIBRARIES = sys.stdlib_module_names | {"pytest", "numpy", "pandas"}
_MAGNITUDES = ("abs", "fabs", "absolute", "norm")
_ORDERS: dict[str, type[ast.cmpop]] = {
    "assertLess": ast.Lt,
    "assertLessEqual": ast.LtE,
    "assertGreater": ast.Gt,
    "assertGreaterEqual": ast.GtE,
}
_SUMMARIES = ("max", "amax", "sum", "mean", "float", "total_seconds")
"""Calls around or inside an absolute value that keep the order of absolute values."""
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


class Spans:
    """The bytes of a source's nodes. Raises UnicodeDecodeError for a source that is not UTF-8: the parser counts bytes
    of UTF-8.
    """

    def __init__(self, source: bytes) -> None:
        source.decode()
        self.source = source
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        if source.startswith(codecs.BOM_UTF8):  # the parser does not count it
            self.offsets[0] = len(codecs.BOM_UTF8)

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Return the node's first byte."""
        return self.offsets[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Return the byte after the node."""
        assert node.end_lineno is not None and node.end_col_offset is not None, "the parser sets both"
        return self.offsets[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Return the node's text."""
        return self.source[self.start(node) : self.end(node)].decode()

    def begin(self, statement: ast.stmt) -> int:
        """Return the first byte of a statement that is alone in its line, or of its first decorator."""
        return self.offsets[_first_line(statement) - 1] + statement.col_offset

    def indent(self, statement: ast.stmt) -> str | None:
        """Return the blanks before a statement, None if other code is before it in its line."""
        line = self.source[self.offsets[statement.lineno - 1] : self.start(statement)].decode()
        return None if line.strip() else line


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(node.lineno for node in decorators)])


class Place(NamedTuple):
    """A statement. `is_certain`: each run of the function that ends without an exception has run it."""

    statement: ast.stmt
    is_certain: bool


def places_of(function: Function) -> Iterator[Place]:
    """Yield the statements of a function in the order of the text, without those of functions inside it."""
    yield from _places(function.body, True)


def _places(body: list[ast.stmt], is_certain: bool) -> Iterator[Place]:
    for statement in body:
        yield Place(statement, is_certain)
        if isinstance(statement, Function | ast.ClassDef):
            continue
        inner = is_certain and isinstance(statement, ast.With | ast.AsyncWith) and not _may_leave(statement)
        for part in _parts(statement):
            yield from _places(part, inner)
        is_certain = is_certain and not _leaves_early(statement)


def _parts(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a statement, also of its `except` and `case` clauses."""
    for name in _BLOCKS:
        for one in getattr(statement, name, []):
            if isinstance(one, ast.stmt):
                yield getattr(statement, name)
                break
            yield one.body


def _may_leave(statement: ast.With | ast.AsyncWith) -> bool:
    """Return whether a block may be left by an exception without failing the test: `suppress`, `raises`, `warns`."""
    names = (call_name(item.context_expr).lower() for item in statement.items)
    return any(word in name for name in names for word in ("suppress", "raises", "warns"))


def _leaves_early(statement: ast.stmt) -> bool:
    if isinstance(statement, Function | ast.ClassDef):
        return False
    inside = (one for part in _parts(statement) for one in part)
    return isinstance(statement, ast.Return | ast.Break | ast.Continue) or any(map(_leaves_early, inside))


def returns_early(function: Function) -> bool:
    """Return whether the function may end before its last statement without an exception."""
    return any(isinstance(place.statement, ast.Return) for place in places_of(function))


def start_of_code(tree: ast.Module, spans: Spans) -> int:
    """Return the byte before the first statement that is neither the docstring nor an import from `__future__`."""
    for number, statement in enumerate(tree.body):
        is_docstring = number == 0 and ast.get_docstring(tree, clean=False) is not None
        if not is_docstring and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            return spans.offsets[_first_line(statement) - 1]
    return len(spans.source)


class Pair(NamedTuple):
    """Two values with a relation that an assertion requires. `is_certain`: each run that passes has evaluated them.
    `tolerance`: how far apart they may be, if the test says it.
    """

    sides: list[ast.expr]
    is_certain: bool
    tolerance: ast.expr | None = None


def equal_pairs(test: ast.expr, is_certain: bool) -> Iterator[Pair]:
    """Yield the values that must be equal if the condition holds."""
    for part, certain in _conditions(test, is_certain):
        if isinstance(part, ast.Compare) and all(isinstance(op, ast.Eq) for op in part.ops):
            yield Pair([part.left, *part.comparators][-2:], certain)
        elif isinstance(part, ast.Call) and says_equality(call_name(part)):
            yield Pair(part.args[:2] if len(part.args) == 2 else [], certain)


def related_pairs(test: ast.expr, is_certain: bool) -> Iterator[Pair]:
    """Yield pairs of values with another relation that must hold; one such as `!=` and `not in` is none."""
    for part, certain in _conditions(test, is_certain):
        if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], _RELATIONS):
            sides = [part.left, *part.comparators]
            if _holds_for_nothing(sides, part.ops[0]):
                continue
            difference = _difference(sides, part.ops[0])
            yield Pair(sides, certain) if difference is None else difference._replace(is_certain=certain)
        elif isinstance(part, ast.Call) and call_name(part) in ("isinstance", "isclose", "allclose"):
            yield Pair(part.args[:2], certain)
        elif isinstance(part, ast.Call):
            yield from _text_pairs(part, certain)


def _holds_for_nothing(sides: list[ast.expr], relation: ast.cmpop) -> bool:
    """Return whether an empty result, which may be right, is in every other value, too: in a text, or as a subset."""
    left, right = sides
    if isinstance(relation, ast.In):
        return isinstance(right, ast.Constant) and isinstance(right.value, str | bytes)
    return isinstance(left if isinstance(relation, ast.Gt | ast.GtE) else right, ast.Set)


def asserted_pair(call: ast.Call, is_certain: bool) -> Pair:
    """Return the two values that a method of `unittest.TestCase` relates."""
    sides = call.args[:2]
    name = call_name(call)
    difference = _difference(sides, _ORDERS[name]()) if name in _ORDERS else None
    if difference is not None:
        return difference._replace(is_certain=is_certain)
    return Pair(sides, is_certain, _tolerance(call) if name == "assertAlmostEqual" else None)


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


def _difference(sides: list[ast.expr], relation: ast.cmpop) -> Pair | None:
    """Return `a` and `b` of `abs(a - b) < tolerance`, None for another relation.

    Another tolerance would fail any product, also one whose values hide their difference.
    """
    if not isinstance(relation, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return None
    node, tolerance = sides if isinstance(relation, ast.Lt | ast.LtE) else sides[::-1]
    has_magnitude = False
    while isinstance(node, ast.Call):
        name = call_name(node)
        inner = node.args[0] if node.args else getattr(node.func, "value", None)
        if inner is None or name not in (*_MAGNITUDES, *_SUMMARIES):
            return None
        has_magnitude = has_magnitude or name in _MAGNITUDES
        node = inner
    if has_magnitude and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return Pair([node.left, node.right], True, tolerance)
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
    elif len(call.args) == 2 and name == "hasattr" and owner is None:
        searched, wanted = call.args
    else:
        return
    if is_literal(wanted) and not is_literal(searched):
        yield Pair([searched, wanted], is_certain)


class _Condition(NamedTuple):
    test: ast.expr
    is_certain: bool


def _conditions(test: ast.expr, is_certain: bool) -> Iterator[_Condition]:
    """Yield the conditions that all hold if `test` does, also those of each item of `all(...)`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for value in test.values:
            yield from _conditions(value, is_certain)
    elif isinstance(test, ast.Call) and call_name(test) == "all":
        inside = test.args[0] if test.args else getattr(test.func, "value", None)
        if isinstance(inside, ast.GeneratorExp | ast.ListComp):
            yield from _conditions(inside.elt, False)
        elif inside is not None:
            yield from _conditions(inside, is_certain)
    else:
        yield _Condition(test, is_certain)


def call_name(node: ast.AST) -> str:
    """Return the last part of the name of what is called, or of a name itself."""
    node = node.func if isinstance(node, ast.Call) else node
    return str(getattr(node, "attr", getattr(node, "id", "")))


@dataclass(frozen=True, slots=True)
class Side:
    """One of two related values. `is_computed`: it comes from a call, so the product may have computed it."""

    node: ast.expr
    is_computed: bool


def names_of_others(tree: ast.Module) -> frozenset[str]:
    """Return the names of builtins and of what a test imports from libraries: no product computes by them alone."""
    names = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {one.asname or _root(one.name) for one in node.names if _root(one.name) in _LIBRARIES}
        elif isinstance(node, ast.ImportFrom) and not node.level and _root(node.module or "") in _LIBRARIES:
            names |= {one.asname or one.name for one in node.names}
    return frozenset(names)


def _root(module: str) -> str:
    return module.partition(".")[0]


class ComparedValues:
    """Tells expected values of a function from those that the product computes. `others`: of `names_of_others`."""

    def __init__(self, function: Function, others: frozenset[str]) -> None:
        self.others = others
        self.nodes = list(_walk_function(function))
        self.places = list(places_of(function))
        self.from_calls = {
            name.id
            for node in self.nodes
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None
            for target in ([*node.targets] if isinstance(node, ast.Assign) else [node.target])
            for name in ast.walk(target)
            if isinstance(name, ast.Name) and self._has_call(node.value)
        }

    def is_computed(self, node: ast.expr) -> bool:
        """Return whether a call, or a name to which a call's result is assigned, is in the expression."""
        if is_literal(node):
            return False
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        return self._has_call(node) or bool(names & self.from_calls)

    def _has_call(self, node: ast.expr) -> bool:
        """Return whether a call is in the expression that is not one of a library or a constant's method."""
        return any(
            isinstance(one, ast.Await) or (isinstance(one, ast.Call) and self._is_of_product(one.func))
            for one in ast.walk(node)
        )

    def _is_of_product(self, called: ast.expr) -> bool:
        while isinstance(called, ast.Attribute):
            called = called.value
        if isinstance(called, ast.Name):
            return called.id not in self.others
        return not is_literal(called) and not isinstance(called, ast.Call)

    def expected(self, sides: list[ast.expr], rng: random.Random) -> Side:
        """Return the side that is a literal or not computed, of two alike any."""
        found = [Side(node, self.is_computed(node)) for node in sides]
        best = [side for side in found if is_literal(side.node)]
        best = best or [side for side in found if not side.is_computed] or found
        return rng.choice(best)

    def literal_of(self, node: ast.expr) -> ast.expr | None:
        """Return the literal assigned to a name that is used only as a value that must be equal to another."""
        if not isinstance(node, ast.Name):
            return None
        uses = [one for one in self.nodes if isinstance(one, ast.Name) and one.id == node.id]
        values = [
            one.value
            for one in self.nodes
            if isinstance(one, ast.Assign) and len(one.targets) == 1 and call_name(one.targets[0]) == node.id
        ]
        sides = {id(side) for place in self.places for side in _sides(place.statement)}
        only_expected = all(id(one) in sides for one in uses if isinstance(one.ctx, ast.Load))
        stored = sum(isinstance(one.ctx, ast.Store) for one in uses)
        return values[0] if len(values) == stored == 1 and only_expected and is_literal(values[0]) else None


def _walk_function(function: Function) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _sides(statement: ast.stmt) -> list[ast.expr]:
    """Return the expressions that a statement requires to be equal."""
    if isinstance(statement, ast.Assert):
        return [side for pair in equal_pairs(statement.test, True) for side in pair.sides]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return statement.value.args[:2] if says_equality(call_name(statement.value)) else []
    return []


def is_literal(node: ast.expr) -> bool:
    """Return whether an expression consists of constants and containers of them."""
    if isinstance(node, ast.Constant):
        return node.value is not ...
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(key is not None and is_literal(key) for key in node.keys) and all(map(is_literal, node.values))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and is_literal(node.operand)
    if isinstance(node, ast.Call) and not node.keywords:
        return call_name(node) in _LITERAL_CALLS and bool(node.args) and all(map(is_literal, node.args))
    return False


def leaves(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the constants of a literal; an empty container is a leaf itself."""
    if isinstance(node, ast.UnaryOp):
        yield from leaves(node.operand)
        return
    children: list[ast.expr] = []
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        children = node.elts
    elif isinstance(node, ast.Dict):
        children = node.values
    elif isinstance(node, ast.Call):
        children = node.args
    if not children:
        yield node
    for child in children:
        yield from leaves(child)
