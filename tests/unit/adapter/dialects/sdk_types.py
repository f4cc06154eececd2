"""The SDKs' own type definitions of requests, taken apart."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict


def classes_in(hint: Any) -> Iterator[Any]:
    """The classes of request objects that a type hint allows, at any depth of unions and lists."""
    if is_typeddict(hint):
        yield hint
        return
    for inner in get_args(hint):
        yield from classes_in(inner)


def kinds_of(hint: Any) -> set[str]:
    """The values of `type` of the classes that a type hint allows."""
    return {kind for one in classes_in(hint) for kind in literals(get_type_hints(one).get("type"))}


def literals(hint: Any) -> Iterator[str]:
    """The strings that a type hint allows."""
    if get_origin(hint) is Literal:
        yield from (value for value in get_args(hint) if isinstance(value, str))
        return
    for inner in get_args(hint):
        yield from literals(inner)
