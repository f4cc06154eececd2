"""Functions that are written into the test files of broken oracles and run there: they compute a wrong expected value.

`near_value` returns a neighbour of a value that a test compares by equality, or of one with a tolerance a value at a
distance at which no result is near enough to both. `refused_value` is for all other relations, such as `<` and `in`, in
which a neighbour may satisfy another correct solution: with it an ordinary value has no relation at all, and only a
product that compares in its own way may say otherwise. Imports are inside the functions, so that they hide no name of
the test file.
"""

from typing import Any

_STEP = 1
"""1: numbers become larger, -1: smaller. `helper_code.py` sets it, and the next two, for each file."""
_PLACE = 0
_WORD = "qzkvwx"
_MAX_DEPTH = 8


def near_value(value: Any, reached: Any = None, margin: Any = None) -> Any:
    """Return a neighbour of the value. `reached`: list that shows afterwards that the call was made. `margin`: the
    smallest distance from the value."""
    _mark(reached)
    return _near(value, 0) if margin is None else _moved(value, margin)


def refused_value(value: Any, reached: Any = None) -> Any:
    """Return a value that refuses every comparison."""
    _mark(reached)
    return _refusing()


def _mark(reached: Any) -> None:
    if reached is not None:
        reached.append(True)


def _moved(value: Any, margin: Any) -> Any:
    """Return the value moved by a margin, or one that refuses comparisons if it does not change by that."""
    try:
        other = value + margin if _STEP > 0 else value - margin
        same = other == value
        same = same.any() if hasattr(same, "any") else same
        return _refusing() if same else other
    except Exception:  # no number, or a tolerance for each item of a container
        return _refusing()


def _refusing() -> Any:
    """Return an object that compares with nothing and equals nothing. The other side's own methods are asked, too, so
    that a product whose values say that they equal anything passes."""
    members = {"__bool__": _refuse, "__len__": _refuse, "__array__": _refuse, "__iter__": _alone}
    return type(_WORD, (), {**members, "__eq__": _unknown, "__hash__": object.__hash__, "__array_ufunc__": None})()


def _refuse(*values: Any) -> Any:
    raise TypeError


def _unknown(*values: Any) -> Any:
    return NotImplemented


def _alone(value: Any) -> Any:
    """Yield the value as its only member, which a search compares with what it looks for."""
    yield value


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
        return value + _STEP if value + _STEP != value else value * 3
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
        items = items or [0]
        return type(value)(*items) if hasattr(value, "_make") else type(value)(items)
    return None


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
        return type(_WORD, (), {})
    if all(hasattr(value, name) for name in ("expected", "rel", "abs")):  # pytest.approx
        changed = copy.copy(value)
        changed.expected = _moved(value.expected, 3 * value.tolerance) if hasattr(value, "tolerance") else _refusing()
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
