"""Find assertions in tests of any language by their words, operators and literals.

No parser per language: an edit that does not make the test fail with the gold patch is dropped at admission, so a rough
search is enough. An expected value gets a neighbour only if the words or operators say that the test requires equality.
"""

import random
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from grading.assertions.helper_code import HelperCode, javascript_helper
from grading.assertions.site import (
    AssertionSite,
    Insertion,
    Kind,
    far_number,
    far_text,
    other_number,
    other_text,
    says_equality,
)
from grading.assertions.tokens import (
    CHARACTERS,
    Token,
    file_ending,
    needed_relation,
    tokens_in_branches,
    tokens_of,
    uses_of,
)

_JAVASCRIPT = (".js", ".mjs", ".cjs", ".jsx")
_TYPESCRIPT = (".ts", ".mts", ".cts", ".tsx")
_RELATED = re.compile(
    r"^(?:to|assert|expect|should|must|is|has|contains?|includes?)_?(?!.*not)\w*"
    r"(?:contain|include|great|less|close|match|equal|almost|near|approx|start|end)",
    re.IGNORECASE,
)
"""Assertions of another relation than equality, or of equality with a tolerance."""
_ORDER = re.compile("great|less", re.IGNORECASE)
_SEARCH = re.compile("contain|include|match|start|end", re.IGNORECASE)
_ASSERTION_LINE = re.compile(r"assert|expect|require|check|\bif\b|\btest\b|\[ |should|must", re.IGNORECASE)
_HEADER = re.compile(
    r"\bfunc\s+(?P<go>Test\w+)|\bfn\s+(?P<rust>\w+)|\bfunction\s+(?P<php>test\w+)|\bdef\s+(?P<ruby>test_\w+)"
    r"|\bvoid\s+(?P<java>\w+)\s*\(|\bTEST(?:_[FP])?\s*\(\s*(?P<gtest>\w+\s*,\s*\w+)"
    r"|\b(?:it|test|specify|describe)\s*\(?\s*(?P<quote>['\"`])(?P<js>[^\n]{0,200}?)(?P=quote)"
)
"""The beginning of a test in Go, Rust, PHP, Ruby, Java, C++ or JavaScript; the group is its name."""
_EXPECTED_NAMES = re.compile(r"^(?:want\w*|expect\w*|exp|output|result)$", re.IGNORECASE)
_OPPOSITES = {
    "strictEqual": "notStrictEqual",
    "deepStrictEqual": "notDeepStrictEqual",
    "deepEqual": "notDeepEqual",
    "equal": "notEqual",
    "toBe": "not.toBe",
    "toEqual": "not.toEqual",
    "toStrictEqual": "not.toStrictEqual",
    "assert_eq!": "assert_ne!",
    "assertEquals": "assertNotEquals",
    "assertSame": "assertNotSame",
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "isEqualTo": "isNotEqualTo",
    "EXPECT_EQ": "EXPECT_NE",
    "ASSERT_EQ": "ASSERT_NE",
    "EXPECT_TRUE": "EXPECT_FALSE",
    "EXPECT_FALSE": "EXPECT_TRUE",
    "ASSERT_TRUE": "ASSERT_FALSE",
    "assert_equal": "refute_equal",
    "must_equal": "wont_equal",
}
_OPPOSITE_OPERATORS = {"!=": "==", "==": "!=", "!==": "===", "===": "!==", "-eq": "-ne", "-ne": "-eq"}
_EQUALITY_OPERATORS = ("==", "===", "!=", "!==")
_BOOLEANS = {"true": "false", "false": "true", "True": "False", "False": "True"}
_DEFINES = (":", ":=", "=")
_MAX_ARGUMENT_TOKENS = 60
_MAX_LINE = 200


def text_sites(source: bytes, name: str, rng: random.Random, up: bool = True) -> list[AssertionSite]:
    """Return a file's assertions in order; an empty `name`: a shell command. `up`: make expected numbers larger."""
    text = source.decode("latin-1")
    headers = list(_HEADER.finditer(text))
    starts = [header.start() for header in headers]
    found = _Finder(source, text, name, rng, up).sites()
    return [replace(site, function=_test_name(headers, bisect(starts, site.start))) for site in found]


def _test_name(headers: list[re.Match[str]], number: int) -> str:
    """Return the name in the last of the first `number` headers, empty if there is none."""
    if number == 0:
        return ""
    names = headers[number - 1].groupdict()
    return next((name for key, name in names.items() if name and key != "quote"), "")


class _Finder:
    def __init__(self, source: bytes, text: str, name: str, rng: random.Random, up: bool) -> None:
        self.source = source
        self.text = text
        self.tokens = tokens_of(text, name)
        self.branches = tokens_in_branches(self.tokens, text, name)
        self.ending = file_ending(name)
        self.has_characters = self.ending in CHARACTERS
        self.is_shell = name == "" or name.endswith((".sh", ".bash"))
        self.rng = rng
        self.up = up
        self._compared: dict[str, bool] = {}
        self._line_ends = [match.start() for match in re.finditer("\n", text)]

    @cached_property
    def helper(self) -> HelperCode:
        return javascript_helper(self.source, self.ending in _TYPESCRIPT, self.up)

    @cached_property
    def testers(self) -> set[str]:
        """Names of Go's `*testing.T`, the first argument of assertions, which is none of the two values."""
        return (
            set(re.findall(r"\b(\w+)\s+(?:\*testing\.[TBF]|testing\.TB)\b", self.text))
            if self.ending == ".go"
            else set()
        )

    def sites(self) -> Iterator[AssertionSite]:
        for number, token in enumerate(self.tokens):
            if number in self.branches:
                continue
            for site in self._of_token(number, token):
                lines = sorted(bisect(self._line_ends, at) + 1 for at in (token.start, site.start))
                yield replace(site, first_line=lines[0], last_line=lines[1])

    def _of_token(self, number: int, token: Token) -> Iterator[AssertionSite]:
        if token.kind == "word":
            yield from self._word(number, token)
        elif self._is_comparison(token) and _ASSERTION_LINE.search(self._line(token)):
            yield from self._operator(number, token)

    def _word(self, number: int, token: Token) -> Iterator[AssertionSite]:
        following = self.tokens[number + 1].text if number + 1 < len(self.tokens) else ""
        if following != "(":
            if says_equality(token.text):  # a call without parentheses, as in Ruby
                yield from self._literal("value", self.tokens[number + 1 : number + 2])
            elif following in _DEFINES and _EXPECTED_NAMES.match(token.text) and self._is_compared(token.text):
                yield from self._literal("value", self.tokens[number + 2 : number + 3])
            return
        if token.text in _OPPOSITES:
            yield AssertionSite("negation", "", token.start, token.end, _OPPOSITES[token.text])
        arguments = list(self._arguments(number + 2))
        if arguments and len(arguments[0]) == 1 and arguments[0][0].text in self.testers:
            del arguments[0]
        has_tolerance = any([token.kind for token in argument] == ["number"] for argument in arguments[2:])
        if says_equality(token.text) and not has_tolerance:
            found = [site for argument in arguments for site in self._literal("value", argument)]
            yield from found or self._expression(arguments)
        elif says_equality(token.text) or _RELATED.match(token.text):
            yield from self._related(token.text, arguments)

    def _related(self, name: str, arguments: list[list[Token]]) -> Iterator[AssertionSite]:
        """Yield a value that no correct solution satisfies, for another relation than equality.

        An infinite result is above every number, so that a bound becomes the number with which every order is false.
        Of several members or characters any may be right, and an empty text is in every other one: only what is
        looked for is changed, if it is clear which of the arguments that is. Tolerances stay as they are.
        """
        is_method = name.startswith("to")  # of the result: the second argument is a tolerance or a message
        if _ORDER.search(name):
            for argument in arguments[: 1 if is_method else 2]:
                numbers = [token for token in argument if token.text != "-"]
                if self.ending in (*_JAVASCRIPT, *_TYPESCRIPT) and [one.kind for one in numbers] == ["number"]:
                    yield AssertionSite("refused", "", numbers[0].start, numbers[0].end, "Number.NaN")
        elif _SEARCH.search(name):
            is_clear = len(arguments) == 1 or is_method or self.ending == ".php"
            if is_clear and arguments and [token.kind for token in arguments[0]] == ["string"]:
                yield from self._literal("refused", arguments[0])
        else:
            for argument in arguments[: 1 if is_method else 2]:
                yield from self._literal("refused", argument)

    def _operator(self, number: int, token: Token) -> Iterator[AssertionSite]:
        needed = needed_relation(self.tokens, number, self.text, self.is_shell)
        if needed != "unknown" and token.text in _OPPOSITE_OPERATORS:
            yield AssertionSite("negation", "", token.start, token.end, _OPPOSITE_OPERATORS[token.text])
        if needed == "equal":
            yield from self._neighbours(number)

    def _arguments(self, number: int) -> Iterator[list[Token]]:
        """Yield the tokens of each argument of a call, whose first token has this number."""
        depth = 0
        argument: list[Token] = []
        for token in self.tokens[number : number + _MAX_ARGUMENT_TOKENS]:
            if depth == 0 and token.text in (")", ","):
                yield argument
                argument = []
                if token.text == ")":
                    return
                continue
            depth += (token.text in "([{") - (token.text in ")]}")
            argument.append(token)

    def _expression(self, arguments: list[list[Token]]) -> Iterator[AssertionSite]:
        """Yield a call of the helper's function around the expected value, in languages that have one."""
        if self.ending not in (*_JAVASCRIPT, *_TYPESCRIPT) or not arguments or not arguments[0]:
            return
        second = arguments[1] if len(arguments) > 1 else []
        is_first = not second or (_has_call(second) and not _has_call(arguments[0]))
        wanted = arguments[0] if is_first else second
        text = self.text[wanted[0].start : wanted[-1].end]
        if "=>" not in text and not text.startswith((".", "function")):
            needs = (Insertion(len(self.source), self.helper.text),)
            changed = f"{self.helper.near}({text.encode('latin-1').decode(errors='ignore')})"
            yield AssertionSite("value", "", wanted[0].start, wanted[-1].end, changed, needs)

    def _is_compared(self, name: str) -> bool:
        """Return whether all that is done with a name is to compare it by equality and to print it."""
        if name not in self._compared:
            uses = [self._use(number) for number in uses_of(self.tokens, name)]
            self._compared[name] = "compared" in uses and "other" not in uses
        return self._compared[name]

    def _use(self, number: int) -> str:
        """Return how a word is used: `compared`, `printed`, `defined` or `other`."""
        after = self.tokens[number + 1].text if number + 1 < len(self.tokens) else ""
        if after in _DEFINES:
            return "defined"
        first = number
        while first > 1 and self.tokens[first - 1].text == ".":
            first -= 2
        before = self.tokens[first - 1].text if first else ""
        if before in _EQUALITY_OPERATORS or after in _EQUALITY_OPERATORS:
            return "compared"
        if before in ("(", ",") and after in (")", ","):
            return self._argument_use(first)
        return "defined" if before in ("{", "}", ";", ",") or before[-1:].isalnum() else "other"

    def _argument_use(self, number: int) -> str:
        """Return how a call uses its argument at this number: it prints what follows a string."""
        depth = 0
        for at in range(number - 1, max(0, number - _MAX_ARGUMENT_TOKENS), -1):
            depth += (self.tokens[at].text in ")]}") - (self.tokens[at].text in "([{")
            if depth < 0:
                if says_equality(self.tokens[at - 1].text) or self.tokens[at - 1].text == "Diff":
                    return "compared"
                return "printed" if self.tokens[at + 1].kind == "string" else "other"
        return "other"

    def _neighbours(self, number: int) -> Iterator[AssertionSite]:
        """Yield the literal on either side of an operator, if there is one."""
        for side in (number - 1, number + 1):
            if 0 <= side < len(self.tokens) and not self._has_line_end(number, side):
                token = self.tokens[side]
                if self.is_shell and token.kind == "word" and "$" not in token.text:
                    yield AssertionSite("value", "", token.start, token.end, token.text + "x")
                yield from self._literal("value", [token])

    def _is_comparison(self, token: Token) -> bool:
        """Return whether a token compares: `=` does in `test a = b`, since an assignment has no blanks around it."""
        around = self.text[token.start - 1 : token.start] + self.text[token.end : token.end + 1]
        return token.text in _OPPOSITE_OPERATORS or (self.is_shell and token.text == "=" and around == "  ")

    def _has_line_end(self, number: int, other: int) -> bool:
        first, second = sorted((self.tokens[number], self.tokens[other]), key=lambda token: token.start)
        return "\n" in self.text[first.end : second.start]

    def _literal(self, kind: Kind, tokens: list[Token]) -> Iterator[AssertionSite]:
        """Yield a changed value if the tokens are literals and brackets only."""
        values = [token for token in tokens if self._is_value(token)]
        others = [token for token in tokens if token not in values]
        if values and all(token.text in ("[", "]", "{", "}", ",", "-") for token in others):
            token = self.rng.choice(values)
            text = self._other(token, kind == "refused")
            if text:
                yield AssertionSite(kind, "", token.start, token.end, text)

    def _is_value(self, token: Token) -> bool:
        if token.kind == "string":
            is_expanded = self.is_shell and "$" in token.text and token.text[0] != "'"
            return not is_expanded and not (token.text[0] == "`" and "${" in token.text)
        return token.kind == "number" or token.text in _BOOLEANS

    def _other(self, token: Token, is_far: bool) -> str:
        if token.text in _BOOLEANS:
            return _BOOLEANS[token.text]
        if token.kind == "string":
            quote = token.text[0]
            if quote == "'" and self.has_characters:
                return "'b'" if token.text == "'a'" else "'a'"
            return quote + (far_text(self.rng) if is_far else other_text(token.text[1:-1], self.rng)) + quote
        digits = re.match(r"\d+(?:\.\d+)?", token.text)
        if digits is None or token.text.startswith(("0x", "0b", "0o")):
            return ""
        return (far_number if is_far else other_number)(digits[0], self.up) + token.text[digits.end() :]

    def _line(self, token: Token) -> str:
        """Return the token's line, of a long one the part around the token."""
        before = self.text[max(0, token.start - _MAX_LINE) : token.start]
        after = self.text[token.start : token.start + _MAX_LINE]
        return before[before.rfind("\n") + 1 :] + after.partition("\n")[0]


def _has_call(argument: list[Token]) -> bool:
    return any(token.text == "(" for token in argument)
