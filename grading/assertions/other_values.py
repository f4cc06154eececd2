"""Functions that are written into the test files of broken oracles and run there: they compute a wrong expected value.

`near_value` returns a neighbour of a value that a test compares by equality. The others are for relations such as `<`
and `in`, in which a neighbour may satisfy another correct solution: `python_relations.py` says which is used. They keep
the type if they can, so that the code under test cannot recognise the control run by it; if another value of the type
may satisfy any solution, the value refuses to be compared, and then every product fails. Imports are inside the
functions, so that they hide no name of the test file.
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
    _mark(reached)
    return _near(value, 0)


def far_value(value: Any, reached: Any = None) -> Any:
    """Return a value of the same type that no correct result is likely to be."""
    _mark(reached)
    return _far(value, 0)


def items_value(value: Any, reached: Any = None) -> Any:
    """Return a neighbour of an array that is compared item by item, unless no items may be right, too."""
    _mark(reached)
    return _near(value, 0) if _has_items(value) else _refusing()


def array_value(value: Any, reached: Any = None) -> Any:
    """Return an array far from the value, or one that refuses comparisons if an array without items may be right."""
    _mark(reached)
    return _far(value, 0) if _has_items(value) else _refusing()


def unordered_value(value: Any, reached: Any = None) -> Any:
    """Return a far value; of a number one with which every order is false, because an infinite result may be right."""
    _mark(reached)
    if isinstance(value, (list, tuple)):
        items = [_FAR_WORD if isinstance(one, bool) else unordered_value(one) for one in value]
        return _rebuilt(value, items or [_FAR_WORD])
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float("nan") if is_number else _far(value, 0)


def outside_value(value: Any, margin: Any, reached: Any = None) -> Any:
    """Return the value moved by a distance at which no result is near enough both to it and to the other one."""
    _mark(reached)
    try:
        other = value + margin if _STEP > 0 else value - margin
        same = other == value
        same = same.all() if hasattr(same, "all") else same
        return _far(value, 0) if same else other
    except Exception:
        return _far(value, 0)


def above_value(value: Any, reached: Any = None) -> Any:
    """Return an infinite number, which nothing is greater than, or a value that refuses every comparison."""
    _mark(reached)
    return _endless(value, float("inf"))


def below_value(value: Any, reached: Any = None) -> Any:
    """Return a number that nothing is less than, or a value that refuses every comparison."""
    _mark(reached)
    return _endless(value, float("-inf"))


def sought_value(value: Any, reached: Any = None) -> Any:
    """Return a text that no correct result has, for other values one that refuses every comparison.

    A number or a time may be in every other value's range.
    """
    _mark(reached)
    texts = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    is_text = texts and all(isinstance(one, (str, bytes, bytearray)) for one in texts)
    return _far(value, 0) if is_text else _refusing()


def members_value(value: Any, reached: Any = None) -> Any:
    """Return a container without any of the members, for a text, a range and such a value that refuses comparisons.

    An empty text is in every other one.
    """
    import collections

    _mark(reached)
    try:
        if isinstance(value, (dict, list, tuple, set, frozenset, collections.deque)) and len(value) < 1000:
            other = _far(value, 0)
            if not any(one in value for one in other) and not any(one in other for one in value):
                return other
    except Exception:  # members that cannot be compared
        pass
    return _refusing()


def refused_value(value: Any, reached: Any = None) -> Any:
    """Return a value that refuses every comparison, for relations that another value may satisfy."""
    _mark(reached)
    return _refusing()


def _mark(reached: Any) -> None:
    if reached is not None:
        reached.append(True)


def _has_items(value: Any) -> bool:
    """Return whether an array without items has another shape. One with a single item is compared with any other."""
    try:
        return len(value) > 1 and not isinstance(value, (str, bytes))
    except Exception:  # a number
        return False


def _endless(value: Any, number: float) -> Any:
    import decimal
    import fractions

    if not isinstance(value, (int, float, decimal.Decimal, fractions.Fraction)):
        return _refusing()
    other = number if isinstance(value, int) else _same_type(value, number)
    return other if other == number else number


def _refusing() -> Any:
    """Return an object with which every comparison raises TypeError, so that every product fails."""
    names = "eq ne lt le gt ge contains iter len bool getitem hash float int index add radd sub rsub array"
    members: dict[str, Any] = {f"__{name}__": _refuse for name in names.split()}
    return type(_FAR_WORD, (), {**members, "__array_ufunc__": None})()


def _refuse(*values: Any) -> Any:
    raise TypeError


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
        return _far_array(value)
    return None


def _far_array(value: Any) -> Any:
    """Return an array of floats moved by more than any tolerance; integers and times wrap at a limit."""
    kind = getattr(value, "dtype", None)
    if getattr(kind, "kind", "") not in ("f", "c") and not getattr(kind, "is_floating_point", False):
        return _refusing()
    other = value + _STEP * (abs(value) * 9 + float(_FAR_NUMBER))
    return other.astype(kind) if hasattr(other, "astype") else other


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
        items = {_far_member(key, depth): _far_member(one, depth) for key, one in value.items()}
        return items or {_FAR_WORD: _FAR_WORD}
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return _rebuilt(value, [_far_member(one, depth) for one in value] or [_FAR_WORD])
    return None


def _far_member(value: Any, depth: int) -> Any:
    """Return a far value; of a truth value a word, because `False` is also the 0 beside it."""
    return _FAR_WORD if isinstance(value, bool) else _far(value, depth)
