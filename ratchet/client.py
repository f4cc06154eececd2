"""`from ratchet.client import Client`: the public name of the package `client`.

`ratchet` is the lowest layer and imports nothing above it, so the names are looked up when they are used.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    package = importlib.import_module("client")
    if name.startswith("_") or name not in package.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(package, name)


def __dir__() -> list[str]:
    return sorted(importlib.import_module("client").__all__)
