"""Split the text of a test in any language into words, numbers, strings and operators, and tell conditions apart."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal

_HASH_COMMENTS = (".sh", ".bash", ".rb", ".py", ".php", ".mk", ".t", ".pl", ".r", "Makefile", "")
"""Ends of the file names in whose languages `#` begins a comment; a shell command has no name."""
CHARACTERS = (".rs", ".go", ".c", ".h", ".cc", ".cpp", ".hpp", ".cxx", ".java", ".kt", ".cs", ".scala", ".swift")
"""Ends of the file names in whose languages an apostrophe quotes one character only, or a lifetime."""
_PATTERN = r"""
    (?P<comment>//[^\n]*|/\*.*?\*/{hash})
  | (?P<string>"(?:\\.|[^"\\\n])*"|`[^`]*`|{apostrophe})
  | (?P<number>(?<![\w.])\d[\w.]*)
  | (?P<word>[A-Za-z_$][\w$]*!?)
  | (?P<operator>===|!==|==|!=|:=|=>|-eq\b|-ne\b|[-+*/%<>=&|!?:,;.(){{}}\[\]])
"""
_IF = ("if", "elif", "elsif", "unless")
_BRANCHES = frozenset((*_IF, "else", "while", "switch", "match", "try", "catch", "except", "rescue", "finally", "do"))
_MAX_HEADER = 60
_EQUAL_OPERATORS = ("==", "===", "-eq", "=")

Need = Literal["equal", "unequal", "unknown"]


@dataclass(slots=True, frozen=True)
class Token:
    """A word, number, string or operator, and its place in the text."""

    kind: str
    text: str
    start: int
    end: int


def file_ending(name: str) -> str:
    """Return the ending of a file's name with its dot, or the name if it has none."""
    return name[name.rfind(".") :] if "." in name else name.rpartition("/")[2]


def tokens_of(text: str, name: str) -> list[Token]:
    """Return the tokens of a file of this name, without comments."""
    ending = file_ending(name)
    apostrophe = r"'(?:\\.[^'\n]{0,8}|[^'\\\n])'" if ending in CHARACTERS else r"'(?:\\.|[^'\\\n])*'"
    pattern = _PATTERN.format(hash=r"|\#[^\n]*" if ending in _HASH_COMMENTS else "", apostrophe=apostrophe)
    return [
        Token(str(match.lastgroup), match[0], match.start(), match.end())
        for match in re.finditer(pattern, text, re.VERBOSE | re.DOTALL)
        if match.lastgroup != "comment"
    ]


def tokens_in_branches(tokens: Sequence[Token], text: str, name: str) -> set[int]:
    """Return the tokens in blocks that a passing test may skip: of `if`, `catch` and loops over a call's result."""
    found: set[int] = set()
    stack: list[bool] = []
    depth = 0
    for number, token in enumerate(tokens):
        if token.text == "}" and stack:
            depth -= stack.pop()
        if depth:
            found.add(number)
        if token.text == "{":
            stack.append(_begins_branch(_header(tokens, number, text, name.endswith(".go"))))
            depth += stack[-1]
    return found


def _header(tokens: Sequence[Token], number: int, text: str, is_go: bool) -> list[str]:
    """Return the words of the statement whose block begins at `number`."""
    header: list[str] = []
    depth = 0
    for at in range(number - 1, max(0, number - _MAX_HEADER) - 1, -1):
        word = tokens[at].text
        depth += (word == ")") - (word == "(")
        has_line_end = "\n" in text[tokens[at].end : tokens[at + 1].start]
        is_end = (word == ";" and not is_go) or (has_line_end and header)
        if depth <= 0 and (word in ("{", "}") or is_end):
            break
        header.append(word)
    return header[::-1]


def _begins_branch(header: list[str]) -> bool:
    if any(word in _BRANCHES for word in header[:3]):
        return True
    calls = (before[-1:].isalnum() and word == "(" for before, word in pairwise(header[1:]))
    return header[:1] == ["for"] and any(calls)


def needed_relation(tokens: Sequence[Token], number: int, text: str, is_shell: bool) -> Need:
    """Return what a test requires of the two sides of the comparison at `number`.

    `if a != b {fail}` and `assert(a == b)` require equality. Parts of a condition with `||` in an assertion, or with
    `&&` in an `if`, need not hold or fail alone, so nothing is known.
    """
    line = _line_around(tokens, number, text)
    before, after = line.before, line.after
    if is_shell:
        return _shell_relation(tokens[number].text, before, after)
    place = _enclosing(before)
    if place in ("for", "while", "!"):
        return "unknown"
    fails_if_true = place in _IF
    joined = " ".join([*before, *after])
    if ("& &" if fails_if_true else "| |") in joined or "?" in before:
        return "unknown"
    return "equal" if (tokens[number].text in _EQUAL_OPERATORS) != fails_if_true else "unequal"


def _shell_relation(operator: str, before: list[str], after: list[str]) -> Need:
    line = " ".join([*before, *after]).replace("[ [", "[").split()
    if line.count("[") + line.count("test") != 1 or "!" in before or "while" in before:
        return "unknown"
    fails_if_true = any(word in _IF for word in before) or "& &" in " ".join(after).partition("| |")[0]
    return "equal" if (operator in _EQUAL_OPERATORS) != fails_if_true else "unequal"


@dataclass(slots=True, frozen=True)
class _Line:
    before: list[str]
    after: list[str]


def _line_around(tokens: Sequence[Token], number: int, text: str) -> _Line:
    """Return the words of the same line before and after a token, at most sixty on each side."""
    first = number
    while first > max(0, number - _MAX_HEADER) and "\n" not in text[tokens[first - 1].end : tokens[first].start]:
        first -= 1
    last = number
    while (
        last + 1 < min(len(tokens), number + _MAX_HEADER)
        and "\n" not in text[tokens[last].end : tokens[last + 1].start]
    ):
        last += 1
    words = [token.text for token in tokens[first : last + 1]]
    return _Line(words[: number - first], words[number - first + 1 :])


def _enclosing(before: list[str]) -> str:
    """Return the word that governs a comparison: of the call or statement whose parentheses hold it, `!` if it is
    negated, empty if there is none in the line."""
    depth = 0
    for at in range(len(before) - 1, -1, -1):
        word = before[at]
        if word == ")":
            depth += 1
        elif word == "(" and depth:
            depth -= 1
        elif word == "(":
            governor = before[at - 1] if at else ""
            if governor == "!" or governor in ("for", "while", *_IF):
                return governor
            if governor[-1:].isalnum() or governor[-1:] in ("_", "!"):
                return "!" if re.search(r"false|not|refute|never", governor, re.IGNORECASE) else governor
        elif word in ("for", "while", *_IF) and not depth:
            return word
        elif word in ("{", "}") and not depth:
            return ""
    return ""


def uses_of(tokens: Sequence[Token], name: str) -> Iterator[int]:
    """Return the numbers of the first tokens that are this word, at most 200."""
    return islice((number for number, token in enumerate(tokens) if token.text == name), 200)
