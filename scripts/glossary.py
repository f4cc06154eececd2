"""Write docs/glossary.md from the word list and the enums of ratchet/types.py; with `--check`, only compare."""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path("ratchet/types.py")
PAGE = Path("docs/glossary.md")


def words(tree: ast.Module) -> list[tuple[str, str]]:
    """(word, sentence) for each line `word: sentence.` of the module docstring."""
    docstring = ast.get_docstring(tree) or ""
    return [(match[1], match[2]) for match in re.finditer(r"^([a-z][a-z ]*): (.+\.)$", docstring, re.M)]


def enums(tree: ast.Module) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """(name, docstring, [(value, sentence)]) for each enum."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "StrEnum" for base in node.bases):
            yield node.name, ast.get_docstring(node) or "", list(_values(node))


def _values(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            yield ast.literal_eval(statement.value), ast.literal_eval(following.value)


def page(tree: ast.Module) -> str:
    lines = [
        "# Glossary",
        "",
        "Generated from `ratchet/types.py` by `make docs`. Code, documentation and messages use these words.",
        "",
        "| word | meaning |",
        "|---|---|",
        *(f"| {word} | {sentence} |" for word, sentence in words(tree)),
        "",
        "## States and other values",
    ]
    for name, docstring, values in enums(tree):
        lines += ["", f"### {name}", "", docstring, "", "| value | meaning |", "|---|---|"]
        lines += [f"| `{value}` | {' '.join(sentence.split())} |" for value, sentence in values]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit with 1 if the page is out of date")
    text = page(ast.parse(SOURCE.read_text()))
    if parser.parse_args().check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE} does not match {SOURCE}; run `make docs`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
