"""Text that a text column, a JSON column and Temporal can hold: without NUL and without lone surrogates.

Both come in what other programs print. They are written as escapes, so that a reason that contains one can be stored.
"""

import json
import re
from typing import Any

_ESCAPED = re.compile(r"\\u0000|\\ud[89ab]..(?!\\ud[c-f])|(?<!\\ud[89ab]..)\\ud[c-f]")
"""NUL and half a surrogate pair, as `json.dumps` writes them; it writes what is beyond 16 bits as a whole pair."""
_REFUSED = re.compile("[\0\ud800-\udfff]")


def storable_text(text: str) -> str:
    """Return the text with NUL and lone surrogates written as escapes."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def is_storable(text: str) -> bool:
    """Return whether the text can be stored as it is."""
    return _REFUSED.search(text) is None


def storable_json(value: Any) -> str:
    """Return the value as JSON, all its texts and names of fields as `storable_text` has them."""
    text = json.dumps(value)
    if _ESCAPED.search(text):
        text = json.dumps(storable_parts(value))
    return text


def storable_parts(value: Any) -> Any:
    """Return a value of lists, dicts and texts with `storable_text` of each text, also of the names of fields."""
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, dict):
        return {storable_parts(key): storable_parts(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [storable_parts(one) for one in value]
    return value
