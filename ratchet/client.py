"""Ratchet in Python and notebooks: start, watch, steer and read runs.

    from ratchet.client import Client

    run = Client().run()                       # the newest one
    run.steps().frame()                        # a pandas data frame
    run.set({"training.max_staleness": 2})

The classes are those of the package `client`. `ratchet` is the lowest layer and imports nothing above it, so they are
looked up when they are used.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    package = importlib.import_module("client")
    if name == "__all__":  # `help` lists these
        return package.__all__
    if name.startswith("_") or name not in package.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(package, name)


def __dir__() -> list[str]:
    return sorted(importlib.import_module("client").__all__)
