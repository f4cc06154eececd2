"""Find, by syntax, Python code that decides how values compare, in the lines that a patch adds: a definition of, or an
assignment to, a method of comparison that may hold for a plain value, under any names of its parameters."""

import ast
import re
import textwrap
import unicodedata

_NAMES = ("eq", "ne", "lt", "le", "gt", "ge", "cmp", "contains", "instancecheck", "subclasscheck")
_METHODS = frozenset(f"__{name}__" for name in _NAMES)
_METHOD = rf"__(?:{'|'.join(_NAMES)})__"
_DEFINED = re.compile(rf"\bdef[\s\\]{{1,20}}{_METHOD}|{_METHOD}['\"]?\s{{0,20}}(?:=(?!=)|:|\]\s{{0,20}}=(?!=))")
_PLAIN = frozenset(name for kind in (int, float, complex, str, bytes, tuple, list, dict, set) for name in dir(kind))
"""Attributes of values that tests expect."""
_ORDERS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SIDE = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.Call, ast.keyword, ast.Slice),
    *(ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context),
)
"""Syntax of which all parts are read, for any values."""
_MAX_NODES = 200
_TOP = re.compile(r"^(?=[^\s)\]}])", re.MULTILINE)
_MAX_PARSED_CHARACTERS = 200_000
_MAX_PARTS = 3000


def changes_python_comparisons(text: str) -> bool:
    """Return whether added lines of Python define or assign a method of comparison; parsed as far as they can be."""
    text = unicodedata.normalize("NFKC", text)  # as Python reads names
    parts = [text] if _parsed(text) is not None else _TOP.split(text)
    for part in parts if len(parts) <= _MAX_PARTS else [text]:
        tree = _parsed(part) if len(parts) <= _MAX_PARTS else None
        if any(map(_is_comparison, ast.walk(tree))) if tree is not None else _DEFINED.search(part):
            return True
    return False


def _parsed(text: str) -> ast.Module | None:
    if len(text) > _MAX_PARSED_CHARACTERS:
        return None
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_comparison(node: ast.AST) -> bool:
    """Return whether a node gives a method of comparison a value; a string may name it for `setattr` or `type`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name in _METHODS and not _is_ordinary(node)
    if isinstance(node, ast.Name | ast.Attribute):
        return isinstance(node.ctx, ast.Store) and getattr(node, "id", getattr(node, "attr", "")) in _METHODS
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in _METHODS
    return getattr(node, "asname", getattr(node, "arg", None)) in _METHODS


def _is_ordinary(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a comparison holds for no plain value, or looks for an item in what a container holds."""
    names = [one.arg for one in method.args.args]
    nodes = list(ast.walk(method))[1:]
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    is_plain = all(isinstance(node, ast.Return | ast.If | ast.Expr) for node in statements)
    if len(names) != 2 or len(nodes) > _MAX_NODES or not is_plain:
        return False
    own, other = names
    known = ("NotImplemented", f"not {own} == {other}", "False" if method.name == "__eq__" else "NotImplemented")
    looks_for = re.compile(rf"(?:{own}\.[\w.]+ <=? )?{other} (?:in|<=?) {own}\.[\w.]+")
    returned = [node.value for node in statements if isinstance(node, ast.Return) and node.value is not None]
    return all(
        ast.unparse(result) in known
        or _mirrors(result, own, other)
        or (method.name == "__contains__" and looks_for.fullmatch(ast.unparse(result)) is not None)
        for result in returned
    )


def _mirrors(result: ast.expr, own: str, other: str) -> bool:
    """Return whether a comparison, or one that must hold, too, has the same of each object as its sides: what is read
    of both without a condition, with an attribute that no plain value has."""
    if isinstance(result, ast.BoolOp) and isinstance(result.op, ast.And):
        return any(_mirrors(one, own, other) for one in result.values)
    if not isinstance(result, ast.Compare) or len(result.ops) > 1 or not isinstance(result.ops[0], _ORDERS):
        return False
    left, right = result.left, result.comparators[0]
    read = {
        node.attr for node in ast.walk(right) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == other
    }
    if not read - _PLAIN or not all(isinstance(node, _SIDE) for node in ast.walk(left)):
        return False
    return ast.unparse(left) != ast.unparse(right) == re.sub(rf"\b{own}\b", other, ast.unparse(left))
