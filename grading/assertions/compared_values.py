"""Tell the expected values of a Python test from those that the product computes."""

import ast
import builtins
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from grading.assertions.python_relations import equal_pairs
from grading.assertions.python_syntax import Function, call_name, is_literal, places_of
from grading.assertions.site import says_equality

_LIBRARIES = sys.stdlib_module_names | {"pytest", "numpy", "pandas"}


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


def compared_parameters(function: Function) -> frozenset[int]:
    """Return which arguments of a call a function compares in each run, and only for equality, counted from 0.

    Anything else may be an input of the product, a switch or a bound, which another value may make right.
    """
    names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]]
    first = 1 if names[:1] in (["self"], ["cls"]) else 0
    sides = {id(side) for place in places_of(function) if place.is_certain for side in _sides(place.statement)}
    messages = [node.msg for node in ast.walk(function) if isinstance(node, ast.Assert) and node.msg is not None]
    shown = {id(node) for message in messages for node in ast.walk(message)}
    found = set()
    for at, name in enumerate(names[first:]):
        uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
        counted = [node for node in uses if id(node) not in shown]
        if counted and all(id(node) in sides for node in counted):
            found.add(at)
    return frozenset(found)


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
