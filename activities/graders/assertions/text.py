"""Find assertions in tests of any language by their words, operators and literals.

No parser per language: an edit that does not make the test fail with the gold patch is dropped at admission, so a rough
search is enough.
"""

import random
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from activities.graders.assertions.site import AssertionSite, other_number, other_text

_HASH_COMMENTS = (".sh", ".bash", ".rb", ".py", ".php", ".mk", ".t", ".pl", ".r", "Makefile", "")
"""Ends of the file names in whose languages `#` begins a comment; a shell command has no name."""
_CHARACTERS = (".rs", ".go", ".c", ".h", ".cc", ".cpp", ".hpp", ".cxx", ".java", ".kt", ".cs", ".scala", ".swift")
"""Ends of the file names in whose languages an apostrophe quotes one character only, or a lifetime."""
_PATTERN = r"""
    (?P<comment>//[^\n]*|/\*.*?\*/{hash})
  | (?P<string>"(?:\\.|[^"\\\n])*"|`[^`]*`|{apostrophe})
  | (?P<number>(?<![\w.])\d[\w.]*)
  | (?P<word>[A-Za-z_$][\w$]*!?)
  | (?P<operator>===|!==|==|!=|:=|=>|-eq\b|-ne\b|[-+*/%<>=&|!?:,;.(){{}}\[\]])
"""
_EQUAL = re.compile(r"equal|same|_eq!?$|^eq$|^eql$|^is$|^be$|^tobe$|^tocontain$|^tohavelength$", re.IGNORECASE)
_NOT_EQUAL = re.compile(r"not|unequal|_ne!?$", re.IGNORECASE)
_ASSERTION_LINE = re.compile(r"assert|expect|require|check|\bif\b|\btest\b|\[ |should|must", re.IGNORECASE)
_HEADER = re.compile(
    r"\bfunc\s+(?P<go>Test\w+)|\bfn\s+(?P<rust>\w+)|\bfunction\s+(?P<php>test\w+)|\bdef\s+(?P<ruby>test_\w+)"
    r"|\bvoid\s+(?P<java>\w+)\s*\(|\bTEST(?:_[FP])?\s*\(\s*(?P<gtest>\w+\s*,\s*\w+)"
    r"|\b(?:it|test|specify|describe)\s*\(?\s*(?P<quote>['\"`])(?P<js>[^\n]{0,200}?)(?P=quote)"
)
"""Where a test begins in Go, Rust, PHP, Ruby, Java, C++ and JavaScript; the group is its name."""
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
_COMPARISONS = ("==", "===", "!=", "!==", "-eq")
_BOOLEANS = {"true": "false", "false": "true", "True": "False", "False": "True"}
_MAX_ARGUMENT_TOKENS = 60
_MAX_LINE = 200


@dataclass(slots=True, frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def text_sites(source: bytes, name: str, rng: random.Random, up: bool = True) -> list[AssertionSite]:
    """Return the assertions of a file of this name (empty: a shell command), in the order of the text.

    `up`: expected numbers become larger, else smaller.
    """
    text = source.decode("latin-1")
    headers = list(_HEADER.finditer(text))
    starts = [header.start() for header in headers]
    found = _Finder(_tokens(text, name), text, name, rng, up).sites()
    return [replace(site, function=_test_name(headers, bisect(starts, site.start))) for site in found]


def _test_name(headers: list[re.Match[str]], number: int) -> str:
    """Return the name in the last of the first `number` headers, empty if there is none."""
    if number == 0:
        return ""
    names = headers[number - 1].groupdict()
    return next((name for key, name in names.items() if name and key != "quote"), "")


def _tokens(text: str, name: str) -> list[_Token]:
    ends = _ending(name)
    apostrophe = r"'(?:\\.[^'\n]{0,8}|[^'\\\n])'" if ends in _CHARACTERS else r"'(?:\\.|[^'\\\n])*'"
    pattern = _PATTERN.format(hash=r"|\#[^\n]*" if ends in _HASH_COMMENTS else "", apostrophe=apostrophe)
    return [
        _Token(str(match.lastgroup), match[0], match.start(), match.end())
        for match in re.finditer(pattern, text, re.VERBOSE | re.DOTALL)
        if match.lastgroup != "comment"
    ]


def _ending(name: str) -> str:
    return name[name.rfind(".") :] if "." in name else name.rpartition("/")[2]


class _Finder:
    def __init__(self, tokens: list[_Token], text: str, name: str, rng: random.Random, up: bool) -> None:
        self.tokens = tokens
        self.text = text
        self.has_characters = _ending(name) in _CHARACTERS
        self.is_shell = name == "" or name.endswith((".sh", ".bash"))
        self.rng = rng
        self.up = up

    def sites(self) -> Iterator[AssertionSite]:
        for number, token in enumerate(self.tokens):
            if token.kind == "word":
                yield from self._word(number, token)
            elif token.text in _OPPOSITE_OPERATORS and _ASSERTION_LINE.search(self._line(token)):
                yield AssertionSite("negation", "", token.start, token.end, _OPPOSITE_OPERATORS[token.text])
                if token.text in _COMPARISONS:
                    yield from self._neighbours(number)
            elif self._is_shell_comparison(token) and _ASSERTION_LINE.search(self._line(token)):
                yield from self._neighbours(number)

    def _word(self, number: int, token: _Token) -> Iterator[AssertionSite]:
        following = self.tokens[number + 1].text if number + 1 < len(self.tokens) else ""
        if token.text in _OPPOSITES and following == "(":
            yield AssertionSite("negation", "", token.start, token.end, _OPPOSITES[token.text])
        if _EQUAL.search(token.text) and not _NOT_EQUAL.search(token.text):
            if following == "(":
                for argument in self._arguments(number + 2):
                    yield from self._literal(argument)
            else:  # a call without parentheses, as in Ruby
                yield from self._literal(self.tokens[number + 1 : number + 2])
        elif following in (":", ":=", "=") and _EXPECTED_NAMES.match(token.text) and number + 2 < len(self.tokens):
            yield from self._literal([self.tokens[number + 2]])

    def _arguments(self, number: int) -> Iterator[list[_Token]]:
        """Yield the tokens of each argument of a call, whose first token has this number."""
        depth = 0
        argument: list[_Token] = []
        for token in self.tokens[number : number + _MAX_ARGUMENT_TOKENS]:
            if depth == 0 and token.text in (")", ","):
                yield argument
                argument = []
                if token.text == ")":
                    return
                continue
            depth += (token.text in "([{") - (token.text in ")]}")
            argument.append(token)

    def _neighbours(self, number: int) -> Iterator[AssertionSite]:
        """Yield the literal on either side of an operator, if there is one."""
        for side in (number - 1, number + 1):
            if 0 <= side < len(self.tokens) and not self._has_line_end(number, side):
                token = self.tokens[side]
                if self.is_shell and token.kind == "word" and "$" not in token.text:
                    yield AssertionSite("value", "", token.start, token.end, token.text + "x")
                yield from self._literal([token])

    def _is_shell_comparison(self, token: _Token) -> bool:
        """Return whether a token is the `=` of `test a = b`, which has blanks around it, unlike an assignment."""
        around = self.text[token.start - 1 : token.start] + self.text[token.end : token.end + 1]
        return self.is_shell and token.text == "=" and around == "  "

    def _has_line_end(self, number: int, other: int) -> bool:
        first, second = sorted((self.tokens[number], self.tokens[other]), key=lambda token: token.start)
        return "\n" in self.text[first.end : second.start]

    def _literal(self, tokens: list[_Token]) -> Iterator[AssertionSite]:
        """Yield a changed value if the tokens are literals and brackets only."""
        values = [token for token in tokens if self._is_value(token)]
        others = [token for token in tokens if token not in values]
        if values and all(token.text in ("[", "]", "{", "}", ",", "-") for token in others):
            token = self.rng.choice(values)
            text = self._other(token)
            if text:
                yield AssertionSite("value", "", token.start, token.end, text)

    def _is_value(self, token: _Token) -> bool:
        if token.kind == "string":
            return not (self.is_shell and "$" in token.text and token.text[0] != "'")  # the shell expands it
        return token.kind == "number" or token.text in _BOOLEANS

    def _other(self, token: _Token) -> str:
        if token.text in _BOOLEANS:
            return _BOOLEANS[token.text]
        if token.kind == "string":
            quote = token.text[0]
            if quote == "'" and self.has_characters:
                return "'b'" if token.text == "'a'" else "'a'"
            return quote + other_text(token.text[1:-1], self.rng) + quote
        digits = re.match(r"\d+(?:\.\d+)?", token.text)
        if digits is None or token.text.startswith(("0x", "0b", "0o")):
            return ""
        return other_number(digits[0], self.up) + token.text[digits.end() :]

    def _line(self, token: _Token) -> str:
        """Return the token's line, of a long one the part around the token."""
        before = self.text[max(0, token.start - _MAX_LINE) : token.start]
        after = self.text[token.start : token.start + _MAX_LINE]
        return before[before.rfind("\n") + 1 :] + after.partition("\n")[0]
