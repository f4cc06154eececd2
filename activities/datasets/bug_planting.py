"""Plant bugs into Python sources by single edits of the syntax tree.

A planted bug has a known gold patch, and its recipe is four words instead of a copy of the source. A site is named by
operator, function and its number in that function, in the order of the text. An edit replaces the bytes of one node or
token, so formatting and comments stay, and a recipe gives the same bytes under every Python that parses the file alike.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ratchet.errors import DatasetError

_COMPARE = {
    ast.Lt: (r"<", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">", ">="),
    ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="),
    ast.NotEq: (r"!=", "=="),
    ast.In: (r"in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Is: (r"is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}
_ARITHMETIC = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
_BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_NAMES = {
    "startswith": "endswith", "endswith": "startswith", "lstrip": "rstrip", "rstrip": "lstrip", "strip": "lstrip",
    "lower": "upper", "upper": "lower", "append": "extend", "extend": "append", "min": "max", "max": "min",
    "any": "all", "all": "any", "find": "rfind", "partition": "rpartition", "rpartition": "partition",
    "split": "rsplit", "popleft": "pop", "setdefault": "get",
}  # fmt: skip
_MAX_INTEGER = 1000


@dataclass(slots=True, frozen=True)
class Site:
    """One possible edit. `start`, `end`: byte offsets. `index`: number of the site of `operator` in `function`, from
    0."""

    operator: str
    function: str
    index: int
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """Return the source with this edit."""
        return source[: self.start] + self.text.encode() + source[self.end :]


class _Edit(NamedTuple):
    operator: str
    function: str
    start: int
    end: int
    text: str


class _Finder(ast.NodeVisitor):
    """Collects every known edit inside functions."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.stack: list[str] = []
        self.in_function = 0
        self.lines = [0]
        for line in source.split(b"\n"):
            self.lines.append(self.lines[-1] + len(line) + 1)
        self.found: list[_Edit] = []

    def _start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self.source[self._start(node) : self._end(node)].decode()

    def _add(self, operator: str, start: int, end: int, text: str) -> None:
        if self.in_function:
            self.found.append(_Edit(operator, ".".join(self.stack), start, end, text))

    def _token(self, operator: str, left: ast.expr, right: ast.expr, pattern: str, text: str) -> None:
        """Add an edit of the operator between two operands, if only blanks and parentheses surround it."""
        start = self._end(left)
        gap = self.source[start : self._start(right)].decode()
        match = re.fullmatch(rf"([\s()\\]*)({pattern})([\s()\\]*)", gap)
        if match:
            at = start + len(match[1].encode())
            self._add(operator, at, at + len(match[2].encode()), text)

    def _named(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, function: int) -> None:
        self.stack.append(node.name)
        self.in_function += function
        for statement in node.body:  # neither decorators nor annotations nor defaults
            self.visit(statement)
        self.in_function -= function
        self.stack.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._named(node, 1)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._named(node, 0)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings, because offsets inside them differ between versions of Python."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip error messages, which tests rarely cover."""

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            pattern, text = _COMPARE[type(node.ops[0])]
            self._token("compare", node.left, node.comparators[0], pattern, text)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if len(node.values) == 2:
            self._token("boolean", node.values[0], node.values[1], *_BOOLEAN[type(node.op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(
            isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)))
            for side in (node.left, node.right)
        )
        if type(node.op) in _ARITHMETIC and not is_text:
            self._token("arithmetic", node.left, node.right, *_ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("flag", self._start(node), self._end(node), str(not node.value))
        elif isinstance(node.value, int) and 0 <= node.value < _MAX_INTEGER and self._text(node).isdigit():
            self._add("constant", self._start(node), self._end(node), str(node.value + 1))

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self._add("negate", self._start(node.test), self._end(node.test), f"not ({self._text(node.test)})")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Slice(self, node: ast.Slice) -> None:
        if node.lower is not None and node.upper is None and node.step is None:
            self._add("slice", self._start(node), self._end(node), f":{self._text(node.lower)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        plain = not any(isinstance(argument, (ast.Starred, ast.GeneratorExp)) for argument in node.args)
        if plain and len(node.args) >= 2:
            first, second = node.args[:2]
            between = self.source[self._end(first) : self._start(second)].decode()
            if self._text(first) != self._text(second):
                text = self._text(second) + between + self._text(first)
                self._add("swap_arguments", self._start(first), self._end(second), text)
        if node.keywords and ((plain and node.args) or len(node.keywords) > 1):
            last = node.keywords[-1]
            before = node.keywords[-2] if len(node.keywords) > 1 else node.args[-1]
            if last.arg is not None and self._start(before) < self._start(last):
                self._add("drop_keyword", self._end(before), self._end(last), "")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and node.attr in _NAMES:
            self._add("method", self._end(node) - len(node.attr), self._end(node), _NAMES[node.attr])
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in ("min", "max", "any", "all"):
            self._add("method", self._start(node), self._end(node), _NAMES[node.id])

    def _lose(self, node: ast.stmt) -> None:
        self._add("lose_statement", self._start(node), self._end(node), "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._lose(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._lose(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._lose(node)
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add("loop_exit", self._start(node), self._end(node), "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("loop_exit", self._start(node), self._end(node), "break")


def find_sites(source: bytes) -> Iterator[Site]:
    """Yield every possible edit in the order of the text. Raises SyntaxError if this Python cannot parse the source."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    counts: dict[tuple[str, str], int] = {}
    for edit in sorted(finder.found, key=lambda edit: (edit.start, edit.end, edit.operator)):
        operator, function, start, end, text = edit
        index = counts.get((operator, function), 0)
        counts[operator, function] = index + 1
        yield Site(operator, function, index, source.count(b"\n", 0, start) + 1, start, end, text)


def plant_bug(source: bytes, operator: str, function: str, index: int) -> bytes:
    """Return the source with one bug. Raises DatasetError if there is no such site."""
    for site in find_sites(source):
        if (site.operator, site.function, site.index) == (operator, function, index):
            return site.apply(source)
    raise DatasetError(f"no site {operator} {index} in {function}: the source is another one than the recipe's")
