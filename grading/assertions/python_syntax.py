"""Facts from the syntax tree of a Python test: places of nodes, statements that always run, literals."""

import ast
import codecs
from collections.abc import Iterator
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
LITERAL_CALLS = ("set", "frozenset", "tuple", "list", "dict", "Decimal", "Fraction", "OrderedDict")
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


class Spans:
    """The bytes of a source's nodes. Raises UnicodeDecodeError if it is not UTF-8, in which the parser counts."""

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


def call_name(node: ast.AST) -> str:
    """Return the last part of the name of what is called, or of a name itself."""
    node = node.func if isinstance(node, ast.Call) else node
    return str(getattr(node, "attr", getattr(node, "id", "")))


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
        return call_name(node) in LITERAL_CALLS and bool(node.args) and all(map(is_literal, node.args))
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
