"""Functions that are written into the test files of broken oracles and run there: they compute a wrong expected value.

`near_value` returns a neighbour of a value that a test compares by equality. `far_value` returns a value far from it,
for relations such as `<=` and `in`, in which a neighbour may satisfy another correct solution. Both keep the type if
they can, so that the code under test cannot recognise the control run by it. Imports are inside the functions, so that
they hide no name of the test file.
"""

from typing import Any

_STEP = 1
"""1: numbers become larger, -1: smaller. `helper_code.py` sets it, and the next three, for each file."""
_PLACE = 0
_FAR_WORD = "qzkvwx"
_FAR_NUMBER = 10**25
_MAX_DEPTH = 8


def near_value(value: Any, reached: Any = None) -> Any:
    """Return a neighbour of the value. `reached`: list that shows afterwards that the call was made."""
    if reached is not None:
        reached.append(True)
    return _near(value, 0)


def far_value(value: Any, reached: Any = None, margin: Any = None) -> Any:
    """Return a value of the same type that no correct result is likely to be, to contain or to be in.

    `margin`: a distance at which no result is near enough both to the value and to the other one.
    """
    if reached is not None:
        reached.append(True)
    return _far(value, 0) if margin is None else _beyond(value, margin)


def _beyond(value: Any, margin: Any) -> Any:
    try:
        other = value + margin if _STEP > 0 else value - margin
        return _far(value, 0) if other == value else other
    except Exception:
        return _far(value, 0)


def _near(value: Any, depth: int) -> Any:
    if value is None:
        return 0
    if isinstance(value, bool):
        return not value
    for change in (_near_member, _near_number, _near_text, _near_items, _near_time, _near_array, _near_object):
        try:
            other = change(value, depth + 1) if depth < _MAX_DEPTH else None
        except Exception:
            other = None
        if other is not None:
            return other
    return object()


def _same_type(value: Any, plain: Any) -> Any:
    try:
        return plain if type(plain) is type(value) else type(value)(plain)
    except Exception:
        return plain


def _near_member(value: Any, depth: int) -> Any:
    import enum

    if isinstance(value, enum.Enum):
        others = [one for one in type(value) if one is not value]
        return others[_PLACE % len(others)]
    return None


def _near_number(value: Any, depth: int) -> Any:
    import decimal
    import fractions

    if isinstance(value, int):
        return _same_type(value, int(value) + _STEP)
    if isinstance(value, float):
        return _same_type(value, _near_float(float(value)))
    if isinstance(value, (complex, decimal.Decimal, fractions.Fraction)):
        return value + _STEP if value + _STEP != value else _far_number(value, depth)
    return None


def _near_float(value: float) -> float:
    """Return a float that differs by one unit of the last place written, which is at least 0.001."""
    if value != value or value in (float("inf"), float("-inf")):
        return 0.0
    text = repr(value)
    if "e" in text:
        return value + _STEP * (abs(value) + 1)
    decimals = len(text.partition(".")[2])
    other = round(value + _STEP * 10.0 ** -min(decimals, 3), decimals)
    return other if other != value else value + _STEP * (abs(value) + 1)  # a large float has no such neighbour


def _near_text(value: Any, depth: int) -> Any:
    import pathlib

    if isinstance(value, str):
        return _same_type(value, _near_characters(str.__str__(value)))
    if isinstance(value, pathlib.PurePath):
        return type(value)(_near_characters(str(value)))
    if isinstance(value, (bytes, bytearray)):
        place = _PLACE % len(value) if value else 0
        changed = bytes([(value[place] + _STEP) % 256]) if value else b"a"
        return _same_type(value, bytes(value[:place]) + changed + bytes(value[place + 1 :]))
    return None


def _near_characters(text: str) -> str:
    """Exchange one letter or digit for the next one of its kind; a text without any gets one more."""
    places = [place for place, one in enumerate(text) if "0" <= one <= "9" or "a" <= one <= "z" or "A" <= one <= "Z"]
    if not places:
        return "a" + text
    place = places[_PLACE % len(places)]
    old = text[place]
    first, number = ("0", 10) if old <= "9" else ("A", 26) if old <= "Z" else ("a", 26)
    return text[:place] + chr((ord(old) - ord(first) + _STEP) % number + ord(first)) + text[place + 1 :]


def _near_items(value: Any, depth: int) -> Any:
    import collections
    import copy

    if isinstance(value, dict):
        changed = copy.copy(value)
        key = list(value)[_PLACE % len(value)] if value else 0
        changed[key] = _near(value[key], depth) if value else 1
        return changed
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        items = list(value)
        if items:
            items[_PLACE % len(items)] = _near(items[_PLACE % len(items)], depth)
        return _rebuilt(value, items or [0])
    return None


def _rebuilt(value: Any, items: Any) -> Any:
    return type(value)(*items) if hasattr(value, "_make") else type(value)(items)


def _near_time(value: Any, depth: int) -> Any:
    import datetime

    if isinstance(value, datetime.date):
        return value + datetime.timedelta(days=_STEP)
    if isinstance(value, datetime.timedelta):
        return value + datetime.timedelta(seconds=_STEP)
    if isinstance(value, datetime.time):
        return value.replace(second=(value.second + _STEP) % 60)
    return None


def _near_array(value: Any, depth: int) -> Any:
    if isinstance(value, type) or not hasattr(value, "shape"):
        return None
    if str(getattr(value, "dtype", "")) == "bool":
        return ~value
    return value + 1 if _STEP > 0 else value - 1


def _near_object(value: Any, depth: int) -> Any:
    """Change every attribute of a copy, because an attribute alone may not take part in comparisons."""
    import copy

    if isinstance(value, type):
        return type(_FAR_WORD, (), {})
    if all(hasattr(value, name) for name in ("expected", "rel", "abs")):  # pytest.approx
        changed = copy.copy(value)
        changed.expected = _outside(value, changed, depth)
        return changed
    if callable(value) or type(value).__module__ == "builtins":
        return None
    names = list(getattr(value, "__dict__", {})) or list(getattr(value, "__dataclass_fields__", {}))
    changed = copy.copy(value)
    if not names or changed is value:
        return None
    for name in names:
        other = _near(getattr(value, name), depth)
        if type(other) is object:
            return None
        object.__setattr__(changed, name, other)
    return changed


def _outside(value: Any, changed: Any, depth: int) -> Any:
    """Return the nearest expected value of `pytest.approx` so that no result is near to both."""
    try:
        changed.expected = value.expected + _STEP * 3 * value.tolerance
        if abs(changed.expected - value.expected) > value.tolerance + changed.tolerance:
            return changed.expected
    except Exception:  # a container, which has a tolerance for each item
        pass
    return _far(value.expected, depth)


def _far(value: Any, depth: int) -> Any:
    if isinstance(value, bool):
        return not value
    for change in (_far_number, _far_text, _far_items):
        try:
            other = change(value, depth + 1) if depth < _MAX_DEPTH else None
        except Exception:
            other = None
        if other is not None:
            return other
    return _FAR_WORD if value is None else object()


def _far_number(value: Any, depth: int) -> Any:
    import datetime
    import decimal
    import fractions

    if isinstance(value, (int, float, complex)):
        plain = int(value) if isinstance(value, int) else value
        if plain - plain != 0:  # infinite
            return _same_type(value, 0.0)
        return _same_type(value, plain + _STEP * (_FAR_NUMBER + abs(plain) * 9))
    if type(value) in (decimal.Decimal, fractions.Fraction):
        return value + _STEP * (_FAR_NUMBER + abs(value) * 9)
    if isinstance(value, (datetime.date, datetime.timedelta)):
        return value + datetime.timedelta(days=20000 * _STEP)
    if hasattr(value, "shape") and not isinstance(value, type):
        return value + _STEP * (_FAR_NUMBER % 10**9 + 10**9)  # an array's integers have a limit
    return None


def _far_text(value: Any, depth: int) -> Any:
    import re

    if isinstance(value, str):
        return _FAR_WORD
    if isinstance(value, (bytes, bytearray)):
        return type(value)(_FAR_WORD.encode())
    if isinstance(value, type):
        return type(_FAR_WORD, (), {})
    return re.compile(_FAR_WORD) if isinstance(value, type(re.compile(""))) else None


def _far_items(value: Any, depth: int) -> Any:
    import collections

    if isinstance(value, dict):
        return {_far(key, depth): _far(one, depth) for key, one in value.items()} or {_FAR_WORD: _FAR_WORD}
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return _rebuilt(value, [_far(one, depth) for one in value] or [_FAR_WORD])
    return None
