"""Find the assertions of Python tests by their syntax tree."""

import ast
import random
import re
from collections.abc import Iterator
from typing import Any

from activities.graders.assertions.site import AssertionSite, Kind, other_number, other_text

_EQUAL = re.compile(r"^assert_?(?!not)\w*equals?$|^assert_(?:array|frame|series)_equal$", re.IGNORECASE)
_OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone",
    "assertEqual": "assertNotEqual",
    "assertEquals": "assertNotEqual",
    "assertNotEqual": "assertEqual",
    "assertIsInstance": "assertNotIsInstance",
    "assertRegex": "assertNotRegex",
}
_RAISES = ("raises", "assertRaises", "assertRaisesRegex")
_NEVER_RAISED = "GeneratorExit"
_LITERAL_CALLS = ("approx", "set", "frozenset", "tuple", "list", "dict", "Decimal", "Fraction", "OrderedDict")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_sites(source: bytes, rng: random.Random, up: bool = True) -> list[AssertionSite]:
    """Return every assertion inside functions. `up`: expected numbers become larger, else smaller.

    Raises SyntaxError, ValueError or RecursionError for other text.
    """
    tree = ast.parse(source)
    return [
        site
        for node in ast.walk(tree)
        if isinstance(node, _Function)
        for site in _FunctionSites(source, node, rng, up).sites()
    ]


class _FunctionSites:
    """The assertions of one function, without those of functions inside it."""

    def __init__(self, source: bytes, function: _Function, rng: random.Random, up: bool) -> None:
        self.source = source
        self.function = function
        self.rng = rng
        self.up = up
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.nodes = list(_walk_function(function))

    def sites(self) -> Iterator[AssertionSite]:
        for node in self.nodes:
            if isinstance(node, ast.Assert):
                yield self._replace("negation", node.test, f"not ({self._text(node.test)})")
                yield from self._compared(node.test)
            elif isinstance(node, ast.Call):
                yield from self._called(node)
        if self.function.name.startswith("test") and self.function.body:
            yield self._failure()

    def _compared(self, test: ast.expr) -> Iterator[AssertionSite]:
        """Yield the expected values of `a == b`, also if several are joined by `and`."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for value in test.values:
                yield from self._compared(value)
        elif isinstance(test, ast.Compare) and all(isinstance(op, ast.Eq) for op in test.ops):
            for side in (test.left, *test.comparators):
                yield from self._expected(side)

    def _called(self, call: ast.Call) -> Iterator[AssertionSite]:
        name = _name_of(call.func)
        if name in _OPPOSITES and isinstance(call.func, ast.Attribute):
            end = self._end(call.func)
            yield self._site("negation", end - len(name), end, _OPPOSITES[name])
        if _EQUAL.match(name):
            for argument in call.args[:2]:
                yield from self._expected(argument)
        if name in _RAISES and call.args:
            yield self._replace("value", call.args[0], _NEVER_RAISED)

    def _expected(self, node: ast.expr) -> Iterator[AssertionSite]:
        """Yield one changed value for an expected value: a literal, or a name that only stands for one."""
        literal = node if _is_literal(node) else self._assigned(node)
        if literal is not None:
            leaf = self.rng.choice(list(_leaves(literal)))
            yield self._replace("value", leaf, self._other(leaf))

    def _assigned(self, node: ast.expr) -> ast.expr | None:
        """Return the literal assigned to a name that is used only as an expected value."""
        if not isinstance(node, ast.Name):
            return None
        uses = [one for one in self.nodes if isinstance(one, ast.Name) and one.id == node.id]
        values = [
            one.value
            for one in self.nodes
            if isinstance(one, ast.Assign) and len(one.targets) == 1 and _name_of(one.targets[0]) == node.id
        ]
        sides = {id(side) for one in self.nodes for side in _sides(one)}
        only_expected = all(id(one) in sides for one in uses if isinstance(one.ctx, ast.Load))
        stored = sum(isinstance(one.ctx, ast.Store) for one in uses)
        return values[0] if len(values) == stored == 1 and only_expected and _is_literal(values[0]) else None

    def _other(self, leaf: ast.expr) -> str:
        if not isinstance(leaf, ast.Constant):  # an empty container
            return {ast.List: "[0]", ast.Tuple: "(0,)", ast.Dict: "{0: 0}"}.get(type(leaf), "{0}")
        value = leaf.value
        if isinstance(value, bool):
            return repr(not value)
        if isinstance(value, int | float):
            return self._other_number(value)
        if isinstance(value, str):
            return repr(other_text(value, self.rng))
        if isinstance(value, bytes):
            return repr(other_text(value.decode("latin-1"), self.rng).encode("latin-1"))
        return "0" if value is None else "None"

    def _other_number(self, value: int | float) -> str:
        text = repr(value)
        if any(character not in "0123456789." for character in text):  # an exponent, inf or nan
            return repr(value * 2 + 1)
        return other_number(text, self.up)

    def _failure(self) -> AssertionSite:
        first = self.function.body[0]
        start = self._start(first)
        line = self.source[self.offsets[first.lineno - 1] : start].decode()
        end = "; " if line.strip() else "\n" + line
        return self._site("failure", start, start, f"assert {self.rng.randint(1, 99)} == 0{end}")

    def _replace(self, kind: Kind, node: ast.expr, text: str) -> AssertionSite:
        return self._site(kind, self._start(node), self._end(node), text)

    def _site(self, kind: Kind, start: int, end: int, text: str) -> AssertionSite:
        return AssertionSite(kind, self.function.name, start, end, text)

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self.offsets[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None, "the parser sets both"
        return self.offsets[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self.source[self._start(node) : self._end(node)].decode()


def _walk_function(function: _Function) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _name_of(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _sides(node: Any) -> list[ast.expr]:
    """Return the expressions that an assertion of equality compares."""
    if isinstance(node, ast.Compare) and all(isinstance(op, ast.Eq) for op in node.ops):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call) and _EQUAL.match(_name_of(node.func)):
        return node.args[:2]
    return []


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is not ...
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(_is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(key is not None and _is_literal(key) for key in node.keys) and all(map(_is_literal, node.values))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_literal(node.operand)
    if isinstance(node, ast.Call) and not node.keywords:
        return _name_of(node.func) in _LITERAL_CALLS and bool(node.args) and all(map(_is_literal, node.args))
    return False


def _leaves(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the constants of a literal; an empty container is a leaf itself."""
    if isinstance(node, ast.UnaryOp):
        yield from _leaves(node.operand)
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
        yield from _leaves(child)
