"""Guess what a mistyped name was meant to be, for error messages."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the known name that is nearest to `name`; empty if none is near.

    A dotted name is also near to one that ends in the same word, such as `steps` to `training.steps`.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    last = name.rpartition(".")[2]
    near += [one for one in names if one.rpartition(".")[2] == last]
    return f"; did you mean {near[0]}?" if near else ""


def config_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a pydantic model and of the models inside it, without list indices."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            yield from config_keys(inner, f"{prefix}{name}.")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
