"""Find the assertions of Python tests by their syntax tree.

A correct solution may take another way through a test than the gold patch. So an assertion that is not on every way
(below `if`, `for`, `while`, `try`, or in `all(...)`) is edited together with a guard: the test fails at its end if the
edited assertion was not reached.
"""

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from grading.assertions.compared_values import ComparedValues, Side, compared_parameters, names_of_others
from grading.assertions.helper_code import HelperCode, python_helper
from grading.assertions.python_relations import Pair, asserted_pairs, equal_pairs, is_vague, related_pairs
from grading.assertions.python_syntax import (
    Function,
    Place,
    Spans,
    call_name,
    is_literal,
    leaves,
    places_of,
    returns_early,
    start_of_code,
)
from grading.assertions.site import AssertionSite, Insertion, Kind, other_number, other_text, says_equality

_OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertIn": "assertNotIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertEqual": "assertNotEqual",
    "assertIsInstance": "assertNotIsInstance",
    "assertRegex": "assertNotRegex",
    "assertLess": "assertGreaterEqual",
    "assertLessEqual": "assertGreater",
    "assertAlmostEqual": "assertNotAlmostEqual",
}
_OPPOSITES |= {opposite: name for name, opposite in _OPPOSITES.items()} | {"assertEquals": "assertNotEqual"}
_OF_ONE_VALUE = ("assertTrue", "assertFalse", "assertIsNone")
_RAISES = ("raises", "assertRaises", "assertRaisesRegex")
_CHECKS = ("assert", "check", "compare", "ensure", "expect", "verify")
_NEVER_RAISED = "GeneratorExit"
_QUOTED = re.compile(r"""([rRuU]?('{3}|"{3}|'|"))(.*)\2""", re.DOTALL)


def python_sites(source: bytes, rng: random.Random, up: bool = True) -> list[AssertionSite]:
    """Return functions' assertions. `up`: larger expected numbers. SyntaxError, ValueError or RecursionError."""
    tree = ast.parse(source)
    spans = Spans(source)
    helper = python_helper(source, up)
    others = names_of_others(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    defined = frozenset(function.name for function in functions)
    compared: dict[str, frozenset[int]] = {}
    for function in functions:
        found = compared_parameters(function)
        compared[function.name] = found & compared.get(function.name, found)
    file = _File(spans, helper, Insertion(start_of_code(tree, spans), helper.text), others, defined, compared)
    return [site for function in functions for site in _FunctionSites(file, function, rng, up).sites()]


@dataclass(frozen=True, slots=True)
class _File:
    """The data that the functions of a file share. `insertion`: puts the helper's functions into the file. `functions`:
    names of the functions that the file defines. `compared`: `compared_parameters` of each of them."""

    spans: Spans
    helper: HelperCode
    insertion: Insertion
    others: frozenset[str]
    functions: frozenset[str]
    compared: dict[str, frozenset[int]]


class _FunctionSites:
    """The assertions of one function, without those of functions inside it."""

    def __init__(self, file: _File, function: Function, rng: random.Random, up: bool) -> None:
        self.spans = file.spans
        self.function = function
        self.rng = rng
        self.up = up
        self.helper = file.helper
        self.file = file
        arguments = function.args
        self.helpers = file.functions | {one.arg for one in [*arguments.args, *arguments.kwonlyargs]} - {"self", "cls"}
        self.places = list(places_of(function))
        self.compared = ComparedValues(function, file.others)
        self.indent = file.spans.indent(function.body[0])
        self.can_end = self.indent is not None and not returns_early(function)

    def sites(self) -> Iterator[AssertionSite]:
        for place in self.places:
            for site in self._stated(place):
                last = getattr(place.statement, "end_lineno", None) or place.statement.lineno
                if isinstance(place.statement, ast.With | ast.AsyncWith):
                    last = place.statement.body[0].lineno  # a missing exception is reported for the call in the block
                yield replace(site, first_line=place.statement.lineno, last_line=last)
        if self.function.name.startswith("test") and self.function.body:
            yield self._failure()

    def _stated(self, place: Place) -> Iterator[AssertionSite]:
        if isinstance(place.statement, ast.Assert):
            yield from self._asserted(place, place.statement)
        elif isinstance(place.statement, ast.Expr):
            yield from self._called(place, place.statement)
        elif isinstance(place.statement, ast.With | ast.AsyncWith) and place.is_certain:
            for item in place.statement.items:
                yield from self._raising(item.context_expr)

    def _asserted(self, place: Place, statement: ast.Assert) -> Iterator[AssertionSite]:
        test = statement.test
        text = f"not ({self.spans.text(test)})"
        if place.is_certain:
            yield self._replace("negation", test, text)
        elif self.can_end:
            yield self._guarded(self._replace("negation", test, f"{self.helper.reached}.append(1) or {text}"))
        yield from self._holding(test, place.is_certain)

    def _holding(self, test: ast.expr, is_certain: bool) -> Iterator[AssertionSite]:
        """Yield the values that a condition compares, which must hold."""
        for pair in (*equal_pairs(test, is_certain), *related_pairs(test, is_certain)):
            yield from self._related(pair)

    def _called(self, place: Place, statement: ast.Expr) -> Iterator[AssertionSite]:
        call = statement.value.value if isinstance(statement.value, ast.Await) else statement.value
        if not isinstance(call, ast.Call) or any(isinstance(one, ast.Starred) for one in call.args):
            return
        name = call_name(call)
        if name in _OPPOSITES and isinstance(call.func, ast.Attribute) and place.is_certain:
            end = self.spans.end(call.func)
            yield self._site("negation", end - len(name), end, _OPPOSITES[name])
        if name in _RAISES:
            if place.is_certain:
                yield from self._raising(call)
        elif says_equality(name) and not _has_tolerance(call):
            yield from self._related(Pair(call.args[:2], place.is_certain, True))
        elif name == "assertTrue" and call.args:
            yield from self._holding(call.args[0], place.is_certain)
        elif name.startswith("assert") and name not in _OF_ONE_VALUE and "Not" not in name and len(call.args) > 1:
            for pair in asserted_pairs(call, place.is_certain):
                yield from self._related(pair)
        elif place.is_certain and self.can_end and statement.value is call and self._may_compare(name):
            yield from self._unknown(statement, call)

    def _may_compare(self, name: str) -> bool:
        """Return whether a called function may be a helper's assertion: it is the test's own, a fixture, or says so.

        One of an order or a search is left alone, because an infinite or an empty result may satisfy any other value.
        Another value for an argument of the product may be refused by one correct solution and accepted by another.
        """
        if is_vague(name):
            return False
        return name in self.helpers or any(word in name.lower() for word in _CHECKS)

    def _raising(self, node: ast.expr) -> Iterator[AssertionSite]:
        if isinstance(node, ast.Call) and call_name(node) in _RAISES and node.args:
            yield self._replace("refused", node.args[0], _NEVER_RAISED)

    def _related(self, pair: Pair) -> Iterator[AssertionSite]:
        """Yield another value for the expected one of two related values, which no right result satisfies."""
        if len(pair.sides) != 2 or (pair.tolerance is not None and self.compared.is_computed(pair.tolerance)):
            return
        if pair.is_equal and pair.tolerance is None and pair.is_certain:
            literals = [side if is_literal(side) else self.compared.literal_of(side) for side in pair.sides]
            literal = next((one for one in literals if one is not None), None)
            if literal is not None:
                leaf = self.rng.choice(list(leaves(literal)))
                yield self._replace("value", leaf, self._other(leaf))
                return
        wanted = self.compared.expected(pair.sides, self.rng)
        if pair.is_equal:
            yield from self._computed("value", self.helper.near, wanted.node, pair.is_certain, pair.tolerance)
        elif not wanted.is_computed and (pair.expected is None or wanted.node is pair.sides[pair.expected]):
            yield from self._computed("refused", self.helper.refused, wanted.node, pair.is_certain)

    def _unknown(self, statement: ast.Expr, call: ast.Call) -> Iterator[AssertionSite]:
        """Yield a value that refuses comparisons for a literal argument of a call that may be a helper's assertion.

        The test ends after the call, and other exceptions than a failed assertion count as success. So admission drops
        the edit unless the call compares the literal.
        """
        sides = [Side(node, self.compared.is_computed(node)) for node in call.args]
        literals = [side.node for at, side in enumerate(sides) if self._may_change(call_name(call), at, side.node)]
        before = self.spans.indent(statement)
        if literals and before is not None and any(side.is_computed for side in sides):
            node = self.rng.choice(literals)
            head = self.spans.source[self.spans.start(call) : self.spans.start(node)].decode()
            tail = self.spans.source[self.spans.end(node) : self.spans.end(call)].decode()
            changed = f"{head}{self.helper.refused}({self.spans.text(node)}){tail}"
            lines = ["try:", f"    {changed}", "except AssertionError:", "    raise"]
            lines += ["except Exception:", "    pass", "return"]
            yield replace(self._replace("refused", statement, f"\n{before}".join(lines)), needs=(self.file.insertion,))

    def _may_change(self, name: str, at: int, node: ast.expr) -> bool:
        """Return whether no correct result satisfies another literal as argument `at`.

        In a function that cannot be read a truth value may be a switch, and an empty result is in every text and set.
        """
        if not is_literal(node) or isinstance(node, ast.Call):
            return False
        if name in self.file.functions:
            return at in self.file.compared[name]
        value = node.value if isinstance(node, ast.Constant) else None
        return not isinstance(value, str | bytes | bool) and not isinstance(node, ast.Set | ast.Dict)

    def _computed(
        self, kind: Kind, function: str, node: ast.expr, is_certain: bool, tolerance: ast.expr | None = None
    ) -> Iterator[AssertionSite]:
        """Yield a call of a helper's function around an expression, with a guard unless it is always evaluated."""
        arguments = [self.spans.text(node)]
        if not is_certain or tolerance is not None:
            arguments.append("None" if is_certain else self.helper.reached)
        if tolerance is not None:
            arguments.append(f"3 * ({ast.unparse(tolerance)})")
        site = self._replace(kind, node, f"{function}({', '.join(arguments)})")
        if is_certain:
            yield replace(site, needs=(self.file.insertion,))
        elif self.can_end:
            guarded = self._guarded(site)
            yield replace(guarded, needs=(self.file.insertion, *guarded.needs))

    def _guarded(self, site: AssertionSite) -> AssertionSite:
        """Add a list at the start of the test and, at its end, an assertion that the list is not empty."""
        first, last = self.function.body[0], self.function.body[-1]
        begin = Insertion(self.spans.begin(first), f"{self.helper.reached} = []\n{self.indent}")
        end = Insertion(self.spans.end(last), f"\n{self.indent}assert {self.helper.reached}")
        return replace(site, needs=(begin, end))

    def _other(self, leaf: ast.expr) -> str:
        if not isinstance(leaf, ast.Constant):  # an empty container
            return {ast.List: "[0]", ast.Tuple: "(0,)", ast.Dict: "{0: 0}"}.get(type(leaf), "{0}")
        value = leaf.value
        if isinstance(value, bool):
            return repr(not value)
        if isinstance(value, int | float):
            return self._other_number(value)
        if isinstance(value, str):
            return self._in_quotes(leaf, value, other_text(value, self.rng))
        if isinstance(value, bytes):
            return repr(other_text(value.decode("latin-1"), self.rng).encode("latin-1"))
        return "0" if value is None else "None"

    def _in_quotes(self, leaf: ast.Constant, value: str, other: str) -> str:
        """Return another text in the quotes of a literal, which would else tell that it was changed."""
        written = _QUOTED.fullmatch(self.spans.text(leaf))
        return f"{written[1]}{other}{written[2]}" if written and written[3] == value else repr(other)

    def _other_number(self, value: int | float) -> str:
        text = repr(value)
        if any(character not in "0123456789." for character in text):  # an exponent, inf or nan
            return repr(value * 2 + 1)
        return other_number(text, self.up)

    def _failure(self) -> AssertionSite:
        """Add a failing assertion at the end, so that takeovers by helpers and by the product have happened."""
        text = f"assert {self.rng.randint(1, 99)} == 0"
        if self.can_end:
            end = self.spans.end(self.function.body[-1])
            return self._site("failure", end, end, f"\n{self.indent}{text}")
        start = self.spans.start(self.function.body[0])
        after = "; " if self.indent is None else f"\n{self.indent}"
        return self._site("failure", start, start, text + after)

    def _replace(self, kind: Kind, node: ast.expr | ast.stmt, text: str) -> AssertionSite:
        return self._site(kind, self.spans.start(node), self.spans.end(node), text)

    def _site(self, kind: Kind, start: int, end: int, text: str) -> AssertionSite:
        return AssertionSite(kind, self.function.name, start, end, text)


def _has_tolerance(call: ast.Call) -> bool:
    """Return whether a number follows the two values: a tolerance, unlike a message."""
    return any(isinstance(one, ast.Constant) and isinstance(one.value, int | float) for one in call.args[2:])
