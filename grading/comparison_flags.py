"""Find, by syntax, code that decides how values compare, in the lines that a patch adds.

In Python: a definition of, or an assignment to, a method of comparison, under any names of its parameters. In
JavaScript and TypeScript: an assignment to a member of an imported module of tests or assertions.
"""

import ast
import re
import textwrap
import unicodedata
from collections.abc import Iterator
from itertools import islice

_NAMES = ("eq", "ne", "lt", "le", "gt", "ge", "cmp", "contains", "instancecheck", "subclasscheck")
_METHODS = frozenset(f"__{name}__" for name in _NAMES)
_METHOD = rf"__(?:{'|'.join(_NAMES)})__"
_DEFINED = re.compile(rf"\bdef[\s\\]{{1,20}}{_METHOD}|{_METHOD}['\"]?\s{{0,20}}(?:=(?!=)|:|\]\s{{0,20}}=(?!=))")
_TOP = re.compile(r"^(?=[^\s)\]}])", re.MULTILINE)
_MAX_PARSED_CHARACTERS = 200_000
_MAX_PARTS = 3000
_MODULES = "assert|chai|expect|globals|jasmine|jest|mocha|should|sinon|tap|tape|ava|test|uvu|vitest"
_TEST_MODULE = rf"['\"](?:node:)?(?:[\w@.-]{{1,60}}/){{0,4}}(?:{_MODULES})(?:/[\w-]{{1,40}})?['\"]"
_IMPORTED = re.compile(
    rf"\bimport\s{{1,20}}(?P<esm>[\w$*{{}},\s]{{1,300}}?)\s{{0,20}}\bfrom\s{{0,20}}{_TEST_MODULE}"
    rf"|\b(?:const|let|var)\s{{1,20}}(?P<cjs>[\w${{}},:\s]{{1,300}}?)=\s{{0,20}}"
    rf"require\s{{0,20}}\(\s{{0,20}}{_TEST_MODULE}"
)
_GLOBALS = ("assert", "chai", "expect", "jest", "vi")
_NUM_ALIASES = 3
_MAX_NAMES = 200


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
        return node.name in _METHODS
    if isinstance(node, ast.Name | ast.Attribute):
        return isinstance(node.ctx, ast.Store) and getattr(node, "id", getattr(node, "attr", "")) in _METHODS
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in _METHODS
    return getattr(node, "asname", getattr(node, "arg", None)) in _METHODS


def changes_javascript_assertions(text: str) -> bool:
    """Return whether added lines assign to a member of an assertion or test module that they import."""
    names = {*_GLOBALS}
    for match in _IMPORTED.finditer(text):
        names |= set(_words(match["esm"] or match["cjs"]))
    if len(names) > _MAX_NAMES:  # each is tried at every word of the text, and no honest file imports so many
        return True
    for _ in range(_NUM_ALIASES):
        names |= set(islice(_aliases(text, names), _MAX_NAMES))
    value = (
        rf"(?:(?<![\w$.])(?:{'|'.join(map(re.escape, sorted(names)))})|\brequire\(\s{{0,9}}{_TEST_MODULE}\s{{0,9}}\))"
    )
    member = r"(?:\s{0,9}\.\s{0,9}[\w$]{1,80}|\s{0,9}\[[^\]\n]{1,80}\])"
    return (
        re.search(rf"{value}{member}{{1,6}}\s{{0,9}}=(?![=>])", text) is not None
        or re.search(
            rf"\b(?:Object|Reflect)\s{{0,9}}\.\s{{0,9}}(?:assign|define\w+|set)\s{{0,9}}\(\s{{0,9}}{value}", text
        )
        is not None
    )


def _words(text: str) -> Iterator[str]:
    yield from (word for word in re.findall(r"[\w$]+", text) if word not in ("as", "type", "default"))


def _aliases(text: str, names: set[str]) -> Iterator[str]:
    """Yield the names to which one of `names`, or a member of it, is assigned."""
    known = "|".join(map(re.escape, sorted(names)))
    pattern = rf"\b(?:const|let|var)\s{{1,20}}([\w${{}},:\s]{{1,200}}?)=\s{{0,20}}(?:{known})\b(?!\s{{0,9}}\()"
    for match in re.finditer(pattern, text):
        if not re.match(r"(?:\s{0,9}\.\s{0,9}[\w$]{1,80}){0,6}\s{0,9}\(", text[match.end() : match.end() + 300]):
            yield from _words(match[1])
