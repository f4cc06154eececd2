"""Assertions of Python tests: every edit contradicts the test that it changes."""

import ast
import random
from typing import Any

import pytest

from activities.graders.assertions.python import python_sites

PRODUCT = {"add": lambda a, b: a + b, "words": lambda text: text.split(), "fail": lambda: {}["missing"]}

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


def run(source: str) -> bool:
    """Return whether `test_it` passes."""
    names: dict[str, Any] = {**PRODUCT, "pytest": pytest}
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
            changed = source.encode()[: site.start] + site.text.encode() + source.encode()[site.end :]
            ast.parse(changed)
            assert not run(changed.decode()), (site, changed.decode())


def test_an_expected_value_is_found_where_there_is_one() -> None:
    for name in ("a literal on the right", "an expected value in a name", "an exception", "unittest"):
        assert "value" in {site.kind for site in python_sites(TESTS[name].encode(), random.Random(0))}, name


def test_inputs_are_never_changed() -> None:
    """Another solution may answer another input differently from the gold patch, and be right."""
    source = "def test_it():\n    data = [1, 2]\n    assert add(data[0], 7) == 8\n    assert words('x') == ['x']\n"
    for seed in range(20):
        for site in python_sites(source.encode(), random.Random(seed)):
            if site.kind == "value":
                assert source[site.start : site.end] in ("8", "'x'") and site.start > source.index("=="), site


def test_a_name_that_is_also_an_input_is_left_alone() -> None:
    source = "def test_it():\n    value = 3\n    assert add(value, 0) == value\n"
    assert {site.kind for site in python_sites(source.encode(), random.Random(0))} == {"negation", "failure"}
