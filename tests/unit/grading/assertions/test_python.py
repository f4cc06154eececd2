"""Assertions of Python tests: every edit contradicts the test that it changes."""

import ast
import datetime
import math
import random
import re
import string
from typing import Any

import numpy as np
import pytest

from grading.assertions.python import python_sites
from grading.assertions.site import AssertionSite

PRODUCT = {
    "square": lambda n: n * n,
    "add": lambda a, b: a + b,
    "words": lambda text: text.split(),
    "fail": lambda: {}["missing"],
}
UNITTEST = "import unittest\n\n\ndef test_it(self=unittest.TestCase()):\n    self.{}\n"

TESTS = {
    "a literal on the right": "def test_it():\n    assert add(2, 3) == 5\n",
    "a literal on the left": "def test_it():\n    assert 5 == add(2, 3)\n",
    "an expected value in a name": "def test_it():\n    expected = ['a', 'b']\n    assert words('a b') == expected\n",
    "a nested value": "def test_it():\n    assert {'k': [add(1, 1), (2,)]} == {'k': [2, (2,)]}\n",
    "an empty container": "def test_it():\n    assert words('') == []\n",
    "a negative number": "def test_it():\n    assert add(-2, 1) == -1\n",
    "joined by and": "def test_it():\n    assert add(1, 1) == 2 and add(2, 2) == 4\n",
    "no equality": "def test_it():\n    assert add(1, 1) > 1\n",
    "an exception": "def test_it():\n    with pytest.raises(KeyError):\n        fail()\n",
    "on one line": "def test_it(): assert add(1, 1) == 2\n",
    "no assertion at all": "def test_it():\n    add(1, 1)\n",
    "after a docstring with tabs": 'def test_it():\n\t"""It adds."""\n\tassert add(1, 1) == 2\n',
    "non-ASCII text before it": "def test_it():\n    größe = 'ü'; assert add(1, 1) == 2, größe\n",
    "unittest": (
        "import unittest\n\n\nclass TestIt(unittest.TestCase):\n    def test_it(self):\n"
        "        self.assertEqual(add(1, 1), 2)\n        self.assertTrue(add(1, 1))\n\n\n"
        "def test_it():\n    TestIt('test_it').test_it()\n"
    ),
}


class Same(int):
    """An integer that equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


TAKEOVERS = {
    "a parameter": "def test_it(given=7, wanted=49):\n    assert square(given) == wanted\n",
    "a constant": "WANTED = 49\n\n\ndef test_it():\n    assert square(7) == WANTED\n",
    "an expression": "def test_it():\n    assert square(7) == 7 * 7\n",
    "a loop": "CASES = [(2, 4)]\n\n\ndef test_it():\n    for n, wanted in CASES:\n        assert square(n) == wanted\n",
    "all": "def test_it():\n    assert all(square(n) == n * n for n in range(2, 9))\n",
    "unittest": (
        "import unittest\n\n\nclass TestIt(unittest.TestCase):\n    def test_it(self):\n"
        "        for n, wanted in [(2, 4)]:\n            with self.subTest(n):\n"
        "                self.assertEqual(square(n), wanted)\n\n\ndef test_it():\n    TestIt('test_it').debug()\n"
    ),
}
NUMPY = "import numpy as np\n\n\ndef test_it():\n    "
NEW_YEAR = np.datetime64("2020-01-01", "ns")
NOON = datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC)
DAY = np.timedelta64(1, "D")


class Unbounded:
    """Contains every positive number and has every attribute."""

    def __contains__(self, value: Any) -> bool:
        return bool(value > 0)

    def __getattr__(self, name: str) -> str:
        return name


OTHER_WAYS: dict[str, tuple[str, Any, Any]] = {
    "every attribute": ("def test_it():\n    assert hasattr(product(), 'real')\n", 1, Unbounded()),
    "in an interval": ("def test_it():\n    assert 5 in product()\n", range(10), Unbounded()),
    "part of a text in a method": (UNITTEST.format("assertIn(product(), 'abc')"), "a", ""),
    "part of a named text": ("TEXT = 'abc'\n\n\ndef test_it():\n    assert product() in TEXT\n", "a", ""),
    "part of a formatted text": ("def test_it():\n    assert product() in f'{1}abc'\n", "a", ""),
    "subset in a method": (UNITTEST.format("assertLessEqual(product(), {'a', 'b'})"), {"a"}, set()),
    "subset of a frozen set": ("def test_it():\n    assert product() <= frozenset({'a', 'b'})\n", {"a"}, set()),
    "subset of a named set": ("ONES = {'a', 'b'}\n\n\ndef test_it():\n    assert set(product()) <= ONES\n", ["a"], []),
    "below a text": ("def test_it():\n    assert product() < 'm'\n", "lz", "b"),
    "above a text": ("def test_it():\n    assert product() > 'm'\n", "n", "zz"),
    "above a named text": ("END = 'm'\n\n\ndef test_it():\n    assert product() > END\n", "n", "zz"),
    "below a list": ("def test_it():\n    assert product() < [3]\n", [2], []),
    "in a list": ("def test_it():\n    assert product() in ['a', 'b']\n", "a", "b"),
    "in a named tuple": ("ONES = (1, 2)\n\n\ndef test_it():\n    assert product() in ONES\n", 1, 2),
    "a truth value beside a number": ("def test_it():\n    assert product() in (True, 0)\n", True, 0),
    "a random number": ("def test_it():\n    assert product() > 0\n", 1, 1 << 127),
    "infinite": ("def test_it():\n    assert product() > 100\n", 101, math.inf),
    "infinite in a method": (UNITTEST.format("assertGreater(product(), 100)"), 101, math.inf),
    "at least, infinite": ("def test_it():\n    assert product() >= 100\n", 100, math.inf),
    "at most, infinite": ("def test_it():\n    assert 100 >= product()\n", 100, -math.inf),
    "the last date": (
        "from datetime import UTC, datetime\n\n\ndef test_it():\n"
        "    assert product() > datetime(2020, 1, 1, tzinfo=UTC)\n",
        NOON,
        NOON.replace(year=9999),
    ),
    "a number of numpy": (f"{NUMPY}assert product() >= np.int64(5)\n", 5, 10**12),
    "a time of numpy": (f"{NUMPY}assert product() > np.datetime64('2020-01-01', 'ns')\n", NEW_YEAR + 1, NEW_YEAR + DAY),
    "an array": (f"{NUMPY}assert (product() >= np.array([1])).all()\n", np.array([1]), np.array([10**12])),
    "an empty array": (f"{NUMPY}assert (product() > 0).all()\n", np.array([1]), np.array([])),
    "no item equals": (f"{NUMPY}assert (product() == 3).all()\n", np.array([3]), np.array([])),
    "no item is close": (f"{NUMPY}assert np.isclose(product(), 3).all()\n", np.array([3]), np.array([])),
    "no item differs": (f"{NUMPY}assert (abs(product() - 3) < 0.1).all()\n", np.array([3]), np.array([])),
    "nothing is close": (f"{NUMPY}np.testing.assert_allclose(product(), 3.0)\n", np.array([3.0]), np.array([])),
    "a helper": (
        "def check(a, b):\n    assert a > b\n\n\ndef test_it():\n    check(product(), 3)\n    assert product()\n",
        4,
        math.inf,
    ),
    "a helper of truth values": (
        "def verify(a, b):\n    assert [a] == b[:1] or [a] == b[1:]\n\n\n"
        "def test_it():\n    verify(product(), [True, 0])\n",
        True,
        0,
    ),
    "a helper that searches": (
        "def check_within(a, b):\n    assert a in b\n\n\ndef test_it():\n    check_within(product(), 'abc')\n",
        "a",
        "",
    ),
    "arrays by a function": (f"{NUMPY}np.testing.assert_array_less(product(), 5)\n", 4, -math.inf),
    "at most": ("def test_it():\n    assert product() <= 5\n", 5, 3),
    "at least": (UNITTEST.format("assertGreaterEqual(product(), 3)"), 3, 6),
    "less": (UNITTEST.format("assertLess(product(), 5)"), 4, 3),
    "delta": (UNITTEST.format("assertAlmostEqual(product(), 3.14, delta=0.01)"), 3.1301, 3.1415),
    "difference": ("def test_it():\n    assert abs(product() - 3.14) < 0.01\n", 3.1301, 3.1499),
    "bounded first": ("def test_it():\n    assert 0.01 >= abs(3.14 - product())\n", 3.1301, 3.1499),
    "difference in a method": (UNITTEST.format("assertLessEqual(abs(product() - 3.14), 0.01)"), 3.1301, 3.1499),
    "places": (UNITTEST.format("assertAlmostEqual(product(), 3.14, places=1)"), 3.0999, 3.1415),
    "approx": ("import pytest\n\n\ndef test_it():\n    assert product() == pytest.approx(3.1, 0.1)\n", 3.2, 3.1),
    "contains": ("def test_it():\n    assert 'b' in product()\n", ["a", "b"], list("abcdefghijklmnopqrstuvwxyz")),
    "is contained": (UNITTEST.format("assertIn('b', product())"), ["b"], list("abcdefghijklmnopqrstuvwxyz")),
    "starts": ("def test_it():\n    assert product().startswith(('ab', 'x'))\n", "abc", "x"),
    "ends": (UNITTEST.format("assertTrue(product().endswith('c'))"), "abc", "c"),
    "is found": ("import re\n\n\ndef test_it():\n    assert re.search('b+', product())\n", "abc", "bbb"),
    "superset": ("def test_it():\n    assert {'a'}.issubset(product())\n", {"a"}, {"a", "b"}),
    "subset": ("def test_it():\n    assert product() <= {'a', 'b'}\n", {"a"}, set()),
    "part of a text": ("def test_it():\n    assert product() in 'ab'\n", "a", ""),
    "positive": ("def test_it():\n    assert product() > 0\n", 1, 1_800_000_000_000_000_000),
    "isinstance": ("def test_it():\n    assert isinstance(product(), int)\n", 1, True),
    "unequal": ("def test_it():\n    assert product() != 0\n", 1, 2),
    "not": ("def test_it():\n    assert not product() == 0\n", 1, 2),
    "or": ("def test_it():\n    assert product() == 1 or product() == 2\n", 1, 2),
}


@pytest.mark.parametrize("letter", string.ascii_lowercase)
def test_a_letter_is_in_a_word_of_letters(letter: str) -> None:
    source = "import string\n\n\ndef test_it():\n    assert product() in string.ascii_lowercase\n"
    for site in python_sites(source.encode(), random.Random(0)):
        assert not run(edited(source, site), product=lambda: letter), edited(source, site)


@pytest.mark.parametrize(
    "condition",
    [
        "max(abs(a - b) for a, b in zip(product(), [1, 2])) < 0.1",
        "sum([abs(a - b) for a, b in zip(product(), [1, 2])]) <= 0.1",
        "abs(product() - 3.5) / 3.5 < 0.1",
        "0.1 > abs(product())",
        "abs(product() - 3.5) < limit()",
    ],
)
def test_tolerances_are_never_changed(condition: str) -> None:
    source = f"def test_it():\n    assert {condition}\n"
    for seed in range(10):
        for site in python_sites(source.encode(), random.Random(seed)):
            assert site.kind != "refused" or source[site.start : site.end] in ("a", "b"), edited(source, site)


def test_an_edited_assertion_has_no_word_of_the_helper() -> None:
    source = "def test_it():\n    assert abs(product() - 3.14) < 0.01\n"
    [site] = [site for site in python_sites(source.encode(), random.Random(0)) if site.kind == "value"]
    assert re.fullmatch(r"\w+\(3\.14, None, 3 \* \(0\.01\)\)", site.text)


class Near(float):
    """A number that is as near to any other one as a test wants, if it is near at all."""

    def __sub__(self, other: float) -> float:
        return 0.0 if abs(float(self) - float(other)) < 2 else float(self) - float(other)

    def __rsub__(self, other: float) -> float:
        return self - other


class Agreeing(str):
    """A text that begins and ends with what a test wants, and contains it."""

    def startswith(self, *others: object) -> bool:
        return True

    endswith = issuperset = startswith


TAKEN_RELATIONS: dict[str, tuple[str, Any, Any]] = {
    "difference": ("def test_it():\n    assert abs(product() - 3.14) < 0.01\n", 3.14, Near(2)),
    "of arrays": (
        "import numpy as np\n\n\ndef test_it():\n    assert np.max(np.abs(product() - 3.14)) < 0.01\n",
        3.14,
        Near(2),
    ),
    "bounded first": ("def test_it():\n    assert 0.01 >= abs(3.14 - product())\n", 3.14, Near(2)),
    "difference in a method": (UNITTEST.format("assertLess(abs(product() - 3.14), 0.01)"), 3.14, Near(2)),
    "delta": (UNITTEST.format("assertAlmostEqual(product(), 3.14, delta=0.01)"), 3.14, Near(2)),
    "places": (UNITTEST.format("assertAlmostEqual(product(), 3.14, 2)"), 3.14, Near(2)),
    "approx": ("import pytest\n\n\ndef test_it():\n    assert product() == pytest.approx(3.1)\n", 3.1, Near(2)),
    "starts": ("def test_it():\n    assert product().startswith('ab')\n", "abc", Agreeing("x")),
    "ends": (UNITTEST.format("assertTrue(product().endswith('c'))"), "abc", Agreeing("x")),
    "superset": ("def test_it():\n    assert product().issuperset({'a'})\n", {"a", "b"}, Agreeing("x")),
    "equality in a method": (UNITTEST.format("assertTrue(product() == 3)"), 3, Same(2)),
    "differences": ("def test_it():\n    assert max(abs(a - 1.5) for a in product()) < 0.1\n", [1.5], [Near(2)]),
}
LOOP: tuple[str, Any, Any] = (
    "def test_it():\n    found = product()\n    assert found is not None\n"
    "    for value in found:\n        assert value == 3\n",
    lambda: [3],
    lambda: [],
)


def failing() -> None:
    raise ValueError("bad x")


BRANCH: tuple[str, Any, Any] = (
    "def test_it():\n    try:\n        found = product()\n    except ValueError as error:\n"
    "        assert str(error) == 'bad x'\n    else:\n        assert found is None\n",
    failing,
    lambda: None,
)


def edited(source: str, site: AssertionSite) -> str:
    """Return the source with the site's edit and the text that it needs."""
    text = source.encode()
    edits = [(site.start, site.end, site.text), *((one.at, one.at, one.text) for one in site.needs)]
    for start, end, new in sorted(edits, key=lambda edit: -edit[0]):
        text = text[:start] + new.encode() + text[end:]
    return text.decode()


def run(source: str, **others: Any) -> bool:
    """Return whether `test_it` passes."""
    names: dict[str, Any] = {**PRODUCT, "pytest": pytest, **others}
    exec(compile(source, "test_it.py", "exec"), names)
    try:
        names["test_it"]()
    except Exception:
        return False
    return True


@pytest.mark.parametrize("name", TESTS)
def test_each_edit_fails_a_correct_product(name: str) -> None:
    source = TESTS[name]
    assert run(source)
    for seed in range(5):
        sites = python_sites(source.encode(), random.Random(seed))
        assert sites
        for site in sites:
            changed = edited(source, site)
            ast.parse(changed)
            assert not run(changed), (site, changed)


def test_an_expected_value_is_found_if_there_is_one() -> None:
    for name in TESTS:
        kinds = {site.kind for site in python_sites(TESTS[name].encode(), random.Random(0))}
        assert kinds & {"value", "refused"} or name == "no assertion at all", name


@pytest.mark.parametrize("name", TAKEOVERS)
@pytest.mark.parametrize("up", [True, False])
def test_a_comparison_that_always_succeeds_passes_an_edited_test(name: str, up: bool) -> None:
    source = TAKEOVERS[name]
    assert run(source) and run(source, square=lambda n: Same(n))
    sites = [site for site in python_sites(source.encode(), random.Random(0), up) if site.kind == "value"]
    assert sites
    for site in sites:
        assert not run(edited(source, site)), edited(source, site)
        assert run(edited(source, site), square=lambda n: Same(n)), edited(source, site)


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_a_correct_solution_fails_every_edit_that_the_gold_patch_fails_in_both_directions(name: str) -> None:
    source, gold, other = OTHER_WAYS[name]
    assert run(source, product=lambda: gold) and run(source, product=lambda: other)
    num_used = 0
    for seed in range(20):
        both = [python_sites(source.encode(), random.Random(seed), up) for up in (True, False)]
        for pair in zip(*both, strict=True):
            failed = [not run(edited(source, site), product=lambda: gold) for site in pair]
            used = pair if all(failed) else [site for site, failed in zip(pair, failed, strict=True) if failed]
            for site in used:
                if all(failed) or site.kind != "value":
                    num_used += 1
                    assert not run(edited(source, site), product=lambda: other), edited(source, site)
    assert num_used


@pytest.mark.parametrize("name", TAKEN_RELATIONS)
def test_a_relation_that_always_holds_passes_an_edited_test(name: str) -> None:
    source, gold, taken = TAKEN_RELATIONS[name]
    assert run(source, product=lambda: gold) and run(source, product=lambda: taken)
    for up in (True, False):
        sites = [
            site for site in python_sites(source.encode(), random.Random(0), up) if site.kind in ("refused", "value")
        ]
        assert sites
        for site in sites:
            assert not run(edited(source, site), product=lambda: gold), edited(source, site)
            assert run(edited(source, site), product=lambda: taken), edited(source, site)


def test_code_that_a_solution_may_not_run_is_edited_with_a_guard() -> None:
    for source, gold, other in (LOOP, BRANCH):
        for seed in range(5):
            sites = python_sites(source.encode(), random.Random(seed))
            assert "value" in {site.kind for site in sites}
            for site in sites:
                for product in (gold, other):
                    assert run(source, product=product)
                    assert not run(edited(source, site), product=product), edited(source, site)


def test_a_test_that_may_return_early_is_edited_only_before() -> None:
    source = (
        "def test_it():\n    assert add(1, 1) == 2\n    if add(0, 0) == 0:\n        return\n    assert add(2, 2) == 5\n"
    )
    for site in python_sites(source.encode(), random.Random(0)):
        assert site.start < source.index("if add"), site


def test_a_helper_that_compares_nothing_passes_an_edited_test() -> None:
    source = "def test_it():\n    verify(square(4), [16, 9])\n    assert square(2) == [4, 9]\n"
    square = {"square": lambda n: [n * n, 9]}

    def verify(found: Any, wanted: Any) -> None:
        assert found == wanted

    [site] = [site for site in python_sites(source.encode(), random.Random(0)) if site.kind == "refused"]
    assert not run(edited(source, site), verify=verify, **square)
    assert run(edited(source, site), verify=lambda *values: None, **square)


@pytest.mark.parametrize(
    ("helper", "literal", "changed"),
    [
        ("def check(a, b):\n    assert a == b", "'abc'", True),
        ("def check(a, b):\n    assert a in b", "'abc'", False),
        ("def check(a, b):\n    assert set(a) <= set(b)", "['a', 'b']", False),
        ("def check(a, b):\n    assert a.issubset(b)", "{'a', 'b'}", False),
        ("def check(a, b):\n    assert a <= b", "5", False),
        ("def check(a, b):\n    assert a == b, f'{a} is not {b}'", "[1, 2]", True),
        ("def check(a, b):\n    assert a('id') == b", "True", True),
        ("def check(request, method, status=200):\n    assert request(method) == status", "'GET'", False),
        ("def check(a, strict):\n    assert (a if strict else a.strip()) == 'x'", "False", False),
        ("def check(pattern, text):\n    assert re.match(pattern, text)", "'abc'", False),
        ("def compare(a, b):\n    assert set(a) <= set(b)\n\n\ndef check(a, b):\n    compare(a, b)", "['a']", False),
        ("def check(a, b):\n    for x, y in zip(a, b):\n        assert x == y", "[1, 2]", False),
        ("def check(a, b):\n    if a:\n        assert a == b", "[1, 2]", False),
        ("from helpers import check", "True", False),
        ("from helpers import check", "'abc'", False),
        ("from helpers import check", "{'a', 'b'}", False),
        ("from helpers import check", "5", True),
    ],
)
def test_a_helper_gets_another_literal_only_if_it_compares_it(helper: str, literal: str, changed: bool) -> None:
    """Else the literal may be an input, a switch or a bound, for which another result may be right."""
    source = f"{helper}\n\n\ndef test_it():\n    check(product(), {literal})\n"
    sites = python_sites(source.encode(), random.Random(0))
    assert changed == any(site.kind == "refused" and site.function == "test_it" for site in sites)


def test_a_literal_of_a_call_that_compares_nothing_changes_nothing() -> None:
    source = "def test_it():\n    save(square(4), 'name')\n"
    for site in python_sites(source.encode(), random.Random(0)):
        if site.kind == "refused":
            assert run(edited(source, site), save=lambda *values: None, square=lambda n: n)


def test_inputs_are_never_changed() -> None:
    """Another solution may answer another input differently from the gold patch, and be right."""
    source = "def test_it():\n    data = [1, 2]\n    assert add(data[0], 7) == 8\n    assert words('x') == ['x']\n"
    for seed in range(20):
        for site in python_sites(source.encode(), random.Random(seed)):
            if site.kind == "value":
                assert source[site.start : site.end] in ("8", "'x'") and site.start > source.index("=="), site


def test_a_name_that_is_also_an_input_is_left_alone() -> None:
    source = "def test_it():\n    value = 3\n    assert add(value, 0) == value\n"
    for site in python_sites(source.encode(), random.Random(0)):
        assert site.start > source.index("assert") and not run(edited(source, site))


def test_other_encodings() -> None:
    """The parser counts neither a byte order mark nor the bytes of an encoding other than UTF-8."""
    text = "def test_it(text='é', wanted=2):\n    assert add(len(text), 1) == wanted; assert add(1, 1) == 2, 'é'\n"
    marked = b"\xef\xbb\xbf" + text.encode()
    for site in python_sites(marked, random.Random(0)):
        edits = [(site.start, site.end, site.text), *((one.at, one.at, one.text) for one in site.needs)]
        changed = marked
        for start, end, new in sorted(edits, key=lambda edit: -edit[0]):
            changed = changed[:start] + new.encode() + changed[end:]
        ast.parse(changed)
        assert not run(changed.decode("utf-8-sig")), changed
    with pytest.raises(UnicodeDecodeError):
        python_sites(f"# -*- coding: latin-1 -*-\n{text}".encode("latin-1"), random.Random(0))


def test_a_truth_value_of_an_unknown_assertion_may_be_a_switch() -> None:
    source = "def test_it():\n    product().assert_has_calls([call(1), call(2)], True)\n"
    sites = python_sites(source.encode(), random.Random(0))
    assert not any(source[site.start : site.end] == "True" for site in sites)
