"""Measure what CONTRIBUTING.md asks of the code, and exit with 1 if a limit is exceeded.

`make house` prints one line per rule: the limit, the figure and, with `--list`, each place that exceeds it. Sizes and
names are measured in the product's packages; prose also in tests, scripts and datasets. Migrations are frozen and
partly generated, so the limit of lines per function leaves them out.
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_PACKAGE_SHARE = 0.15
MAX_FUNCTION_LINES = 60
SHORT_FUNCTION_LINES = 35
MIN_SHORT_FUNCTIONS = 0.9
MAX_LOOSE_WORDS = 5
CONFIG_MODULES = ("ratchet.config", "ratchet.config_sections", "ratchet.temporal_settings")
PROSE_FOLDERS = ["tests", "scripts", "datasets"]
"""Folders beside the packages whose prose is measured."""

LOOSE_WORDS = re.compile(r"\b(whoever|whatever|whichever|nobody)\b", re.IGNORECASE)
WHERE_FOR_IF = re.compile(
    r"(?:\A|[.,;:(]\s+|\b(?:None|False|True|raises?|empty|[A-Za-z]+Error)\s+)where\s+(?!from|to\b)", re.IGNORECASE
)
"""`where` that opens a condition, after punctuation, a value or an error. "The folder where" names a place."""
INDIRECT_QUESTION = re.compile(r"\s*(What|Whether|How|Which|Who|Whose|Where|When|Why)\b")


@dataclass
class Finding:
    """One rule: its limit in words, and the places that exceed it. `allowed` is the number of places that pass."""

    rule: str
    places: list[str] = field(default_factory=list)
    figure: str = ""
    allowed: int = 0
    failed: bool = False

    @property
    def exceeded(self) -> bool:
        return self.failed or len(self.places) > self.allowed


@dataclass(frozen=True)
class Module:
    """One parsed file. `name` is its dotted name."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"


def load_modules(packages: list[str]) -> list[Module]:
    """All Python files that git tracks below `packages`."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *packages],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    modules = []
    for path in sorted(Path(name) for name in names if name.endswith(".py") and Path(name).exists()):
        text = path.read_text()
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        modules.append(Module(path, name, text, ast.parse(text)))
    return modules


def package_shares(modules: list[Module]) -> Finding:
    lines: Counter[str] = Counter()
    for module in modules:
        lines[module.package] += module.text.count("\n")
    package, most = lines.most_common(1)[0]
    share = most / sum(lines.values())
    finding = Finding(f"largest package's share of all lines (at most {MAX_PACKAGE_SHARE:.0%})")
    finding.figure = f"{share:.0%} ({package})"
    finding.failed = share > MAX_PACKAGE_SHARE
    return finding


def long_functions(modules: list[Module]) -> Finding:
    finding = Finding(f"functions over {MAX_FUNCTION_LINES} lines, migrations aside (0)")
    for module in modules:
        if "migrations" not in module.path.parts:
            finding.places += [
                f"{module.at(line)} {name} {lines}"
                for line, name, lines in _functions(module)
                if lines > MAX_FUNCTION_LINES
            ]
    return finding


def _functions(module: Module) -> Iterator[tuple[int, str, int]]:
    """Yield line, name and length of each function."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield node.lineno, node.name, node.end_lineno - node.lineno + 1


def share_of_short_functions(modules: list[Module]) -> Finding:
    lengths = [lines for module in modules for _, _, lines in _functions(module)]
    share = sum(length < SHORT_FUNCTION_LINES for length in lengths) / len(lengths)
    finding = Finding(f"functions under {SHORT_FUNCTION_LINES} lines (at least {MIN_SHORT_FUNCTIONS:.0%})")
    finding.figure = f"{share:.1%}"
    finding.failed = share < MIN_SHORT_FUNCTIONS
    return finding


def values_without_sentence(modules: list[Module], what: str, names: Collection[str], base: str) -> Finding:
    """Find fields or members without a sentence in modules `names`. `base`: that of the classes; empty: all count."""
    finding = Finding(f"{what} without a sentence (0)")
    for module in modules:
        for node in module.tree.body if module.name in names else []:
            if isinstance(node, ast.ClassDef) and (
                not base or any(getattr(one, "id", "") == base for one in node.bases)
            ):
                finding.places += [f"{module.at(line)} {node.name}.{name}" for name, line in _bare_fields(node)]
    return finding


def _bare_fields(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """Fields or members that no string literal with a full sentence follows."""
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
        else:
            continue
        sentence = _literal(following)
        if name != "model_config" and not (sentence and sentence.strip().endswith(".") and " " in sentence.strip()):
            yield name, statement.lineno


def _literal(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def loose_words(modules: list[Module]) -> Finding:
    """Find words that LOOSE_WORDS and WHERE_FOR_IF describe, in docstrings, field sentences and comments."""
    finding = Finding(f"`where` for `if`, whoever, whatever, nobody in prose (at most {MAX_LOOSE_WORDS})")
    finding.allowed = MAX_LOOSE_WORDS
    for module in modules:
        for line, text in _prose(module):
            for match in [*LOOSE_WORDS.finditer(text), *WHERE_FOR_IF.finditer(text)]:
                at = line + text.count("\n", 0, match.end())
                finding.places.append(
                    f"{module.at(at)} …{' '.join(text[max(0, match.start() - 30) : match.end() + 30].split())}…"
                )
    return finding


def indirect_questions(modules: list[Module]) -> Finding:
    """Find docstrings and field sentences that ask what a thing is, instead of saying it."""
    finding = Finding("docstrings that begin as an indirect question (0)")
    for module in modules:
        for line, text in _docstrings(module):
            if INDIRECT_QUESTION.match(text):
                finding.places.append(f"{module.at(line)} {' '.join(text[:60].split())}…")
    return finding


def _docstrings(module: Module) -> Iterator[tuple[int, str]]:
    """Docstrings, and the sentences behind fields and constants."""
    for node in ast.walk(module.tree):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if literal := _literal(statement):
                yield statement.lineno, literal


def _prose(module: Module) -> Iterator[tuple[int, str]]:
    yield from _docstrings(module)
    for number, line in enumerate(module.text.splitlines(), 1):
        if match := re.search(r"(?:^\s*|\s{2})#\s(.+)$", line):
            yield number, match.group(1)


def packed_attributes(modules: list[Module]) -> Finding:
    finding = Finding("attributes assigned as a tuple (0)")
    for module in modules:
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
                continue
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and any(isinstance(element, ast.Attribute) for element in target.elts):
                finding.places.append(module.at(node.lineno))
    return finding


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print each place that exceeds a limit")
    listing = parser.parse_args().list
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]
    modules = load_modules(settings["root_packages"])
    everything = [*modules, *load_modules(PROSE_FOLDERS)]
    findings = [
        package_shares(modules),
        long_functions(modules),
        share_of_short_functions(modules),
        values_without_sentence(modules, "config fields", CONFIG_MODULES, ""),
        values_without_sentence(modules, "enum values of ratchet/types.py", ("ratchet.types",), "StrEnum"),
        loose_words(everything),
        indirect_questions(modules),
        packed_attributes(everything),
    ]
    for finding in findings:
        verdict = "FAIL" if finding.exceeded else "ok"
        print(f"{verdict:<4}  {finding.figure or len(finding.places)!s:>18}  {finding.rule}")
        for place in finding.places if listing and finding.exceeded else []:
            print(f"          {place}")
    return int(any(finding.exceeded for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
