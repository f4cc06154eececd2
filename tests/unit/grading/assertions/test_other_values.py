"""Values computed at run time differ from the true ones, keep their type, and are the same functions in JavaScript."""

import datetime
import decimal
import enum
import fractions
import json
import math
import operator
import pathlib
import re
import shutil
import subprocess
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from grading.assertions.helper_code import javascript_helper, python_helper


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Point:
    x: int
    name: str


@dataclass(frozen=True, slots=True)
class Slotted:
    x: int


class Plain:
    def __init__(self, name: str) -> None:
        self.name = name
        self.line = 3

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.name == other.name

    __hash__ = None  # type: ignore[assignment]


class Millis(int):
    pass


Pair = namedtuple("Pair", "left right")
SAME_TYPE: list[Any] = [
    *(0, 1, -7, 10**30, Millis(3), 0.0, 0.25, 3.14159265, 1e-9, 1e22, 2.0**53 + 4, float("inf"), 2j, True, False),
    *("", "a", "Z", "9", "é", "two words", "a\\n", b"", b"\xff", bytearray(b"a"), pathlib.PurePosixPath("/a/b")),
    *([], [1], [1, [2, {"a": None}]], (), (1, 2), {1}, frozenset({"a"}), {}, {"a": {"b": 1}}, deque([1]), Pair(1, 2)),
    *(Counter("ab"), Counter(), OrderedDict(a=1), defaultdict(int, a=1)),
    *(
        datetime.date(2020, 1, 31),
        datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        datetime.timedelta(1),
        datetime.time(23, 59, 59),
    ),
    decimal.Decimal("-1E+40"),
    *(decimal.Decimal("1.10"), fractions.Fraction(1, 3), Colour.RED, Point(1, "a"), Slotted(1), Plain("a")),
    *(np.int64(3), np.float64(0.5)),
]


def helper_of(up: bool, source: bytes = b"def test_a(): pass\n") -> dict[str, Any]:
    code = python_helper(source, up)
    names: dict[str, Any] = {}
    exec(code.text, names)
    return {"near": names[code.near], "refused": names[code.refused]}


@pytest.mark.parametrize("up", [True, False])
def test_neighbours_differ(up: bool) -> None:
    near = helper_of(up)["near"]
    for value in SAME_TYPE:
        other = near(value)
        assert other != value and value != other and type(other) is type(value), (value, other)
    for value in [None, object(), len, int, ..., lambda: 1]:
        assert near(value) != value
    for array in (np.array([1, 2]), np.array([True])):
        assert not np.array_equal(near(array), array)


def test_a_value_that_refuses_has_no_relation_to_ordinary_ones() -> None:
    refused = helper_of(True)["refused"](3)
    for value in [*SAME_TYPE, None, len, np.array([1.0, 2.0])]:
        for holds in RELATIONS:
            assert not _holds(holds, value, refused), (value, holds)
            assert not _holds(holds, refused, value), (value, holds)


def test_a_product_that_agrees_with_everything_agrees_with_a_value_that_refuses() -> None:
    refused = helper_of(True)["refused"](3)
    same = Same()
    assert same == refused and refused == same and same in refused and refused in [same]
    assert same < refused and refused < same and same >= refused and refused >= same


RELATIONS: list[Callable[[Any, Any], Any]] = [
    operator.eq, operator.lt, operator.le, operator.gt, operator.ge, operator.is_, operator.contains, isinstance,
    math.isclose, np.allclose, operator.sub, re.search, str.startswith,
]  # fmt: skip


def _holds(holds: Callable[[Any, Any], Any], first: Any, second: Any) -> bool:
    try:
        return bool(np.all(holds(first, second)))
    except (TypeError, ValueError):
        return False


class Same:
    def __eq__(self, other: object) -> bool:
        return True

    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = None  # type: ignore[assignment]


def test_numbers_change_in_both_directions() -> None:
    for value, up, down in ((5, 6, 4), (0, 1, -1), (0.25, 0.26, 0.24), (-1.5, -1.4, -1.6)):
        assert helper_of(True)["near"](value) == up and helper_of(False)["near"](value) == down


def test_a_value_within_a_tolerance_becomes_one_far_outside() -> None:
    for expected in (3.1, [3.1, 2.0], {"a": 3.1}):
        for up in (True, False):
            other = helper_of(up)["near"](pytest.approx(expected, 0.1))
            assert expected != other and type(other) is type(pytest.approx(expected))


def test_a_value_moves_by_a_margin_or_refuses_comparisons() -> None:
    assert helper_of(True)["near"](3.0, None, 0.5) == 3.5 and helper_of(False)["near"](3.0, None, 0.5) == 2.5
    for value, margin in ((1e20, 0.5), ("a", 0.5), ([1.0], 0.5), (np.array([1e20, 1.0]), 0.5)):
        other = helper_of(True)["near"](value, None, margin)
        assert not _holds(operator.eq, other, value) and type(other) is not type(value)


def test_the_value_itself_does_not_change() -> None:
    for value in ([1, [2]], {"a": {"b": 1}}, Plain("a"), deque([1]), bytearray(b"a"), Colour.RED):
        before = repr(value)
        helper_of(True)["near"](value)
        helper_of(True)["refused"](value)
        assert repr(value) == before and Colour.RED.value == 1


def test_names_are_the_sources_own_and_differ() -> None:
    first, second = (python_helper(source, True) for source in (b"def test_total(): pass", b"def test_price(): pass"))
    assert first.near != second.near and first == python_helper(b"def test_total(): pass", True)
    assert "near" not in first.text and "refused" not in first.text and "_value" not in first.text


VALUES = (
    "[2 ** 60,"
    " 0, 1, -7, 0.25, 1e-9, Infinity, NaN, 5n, true, false, null, undefined, '', 'a', 'Z', '9', 'é', [], [1], [1, [2]],"
    " {}, {a: 1}, {a: {b: null}}, new Date(0), new Map(), new Map([['a', 1]]), new Set(), new Set([1, 2]),"
    " new Set([true, false]), Buffer.from('ab'), new Uint8Array([0]), new BigInt64Array([1n]), Symbol('a'), () => 1,"
    " new (class Point { constructor() { this.x = 1; this.name = 'a'; } })()]"
)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("up", [True, False])
def test_javascript_neighbours_differ(up: bool) -> None:
    helper = javascript_helper(b"test('a', () => {});", typed=False, up=up)
    script = f"""
const assert = require('assert');
const shown = require('util').inspect;
for (const value of {VALUES}) {{
  const before = shown(value);
  const other = {helper.near}(value);
  assert.notDeepStrictEqual(other, value);
  assert.equal(shown(value), before);
  if (value != null && value === value && typeof value !== 'function' && typeof value !== 'symbol')
    assert.equal(Object.getPrototypeOf(other), Object.getPrototypeOf(value), before);
}}
console.log(JSON.stringify([5, 0.25, 0, -1.5].map((one) => {helper.near}(one))));
{helper.text}"""
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ([6, 0.26, 1, -1.4] if up else [4, 0.24, -1, -1.6])
