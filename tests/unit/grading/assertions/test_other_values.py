"""Values computed at run time differ from the true ones, keep their type, and are the same functions in JavaScript."""

import datetime
import decimal
import enum
import fractions
import json
import pathlib
import shutil
import subprocess
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
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
    return {"near": names[code.near], "far": names[code.far]}


@pytest.mark.parametrize("up", [True, False])
def test_neighbours_and_far_values_differ(up: bool) -> None:
    helper = helper_of(up)
    for value in SAME_TYPE:
        near = helper["near"](value)
        assert near != value and value != near and type(near) is type(value), (value, near)
    others = [None, object(), len, int, ..., lambda: 1, Same(), np.array([1, 2]), np.array([True])]
    for value in [*SAME_TYPE, *others]:
        for other in (helper["near"](value), helper["far"](value)):
            assert other is not value
            if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
                assert not np.array_equal(other, value)
            assert isinstance(value, (np.ndarray, Same)) or differs(other, value), value


def differs(other: Any, value: Any) -> bool:
    try:
        return bool(other != value)
    except TypeError:  # it refuses to be compared
        return True


class Same:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_numbers_change_in_both_directions() -> None:
    for value, up, down in ((5, 6, 4), (0, 1, -1), (0.25, 0.26, 0.24), (-1.5, -1.4, -1.6)):
        assert helper_of(True)["near"](value) == up and helper_of(False)["near"](value) == down


def test_a_value_within_a_tolerance_becomes_one_far_outside() -> None:
    for expected in (3.1, [3.1, 2.0], {"a": 3.1}):
        for up in (True, False):
            other = helper_of(up)["near"](pytest.approx(expected, 0.1))
            assert expected != other and type(other) is type(pytest.approx(expected))


def test_a_truth_value_in_a_container_becomes_no_number() -> None:
    for up in (True, False):
        other = helper_of(up)["far"]([True, 0, {"a": False}])
        assert 0 not in other and 1 not in other and type(other[2]) is dict and 0 not in other[2].values()


def test_arrays_change_by_more_than_any_tolerance_or_cannot_be_compared() -> None:
    for up in (True, False):
        for value in (np.array([1e20, 2.0]), np.array([3.0], np.float32), np.float32(3)):
            other = helper_of(up)["far"](value)
            assert (np.abs(other - value) > 8 * np.abs(value)).all() and (np.abs(other) > 1e20).all()
            assert other.dtype == value.dtype
        for whole in (np.array([1]), np.int32(2**31 - 2), np.datetime64("2020-01-01", "ns"), np.array([True])):
            with pytest.raises(TypeError):
                _ = whole <= helper_of(up)["far"](whole)


def test_the_value_itself_does_not_change() -> None:
    for value in ([1, [2]], {"a": {"b": 1}}, Plain("a"), deque([1]), bytearray(b"a"), Colour.RED):
        before = repr(value)
        helper_of(True)["near"](value)
        helper_of(True)["far"](value)
        assert repr(value) == before and Colour.RED.value == 1


def test_names_are_the_sources_own_and_differ() -> None:
    first, second = (python_helper(source, True) for source in (b"def test_total(): pass", b"def test_price(): pass"))
    assert first.near != second.near and first == python_helper(b"def test_total(): pass", True)
    assert "near" not in first.text and "far" not in first.text and "_value" not in first.text


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
