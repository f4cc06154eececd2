"""Import a user's own reward, loss, advantage, harness or sandbox service by `package.module:attribute`.

A user's module may lie in the directory in which `ratchet` was started. That directory is the last one on the module
path: a user's `engine.py` or `cli.py` must not hide our package of the same name. For the same reason every Python
process of ours is started with `-P`, which keeps the working directory from the front of the path.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ratchet.errors import ConfigError


def import_function(key: str, path: str) -> Callable[..., Any]:
    """Return the function of the user's that a config's key names. Raises ConfigError."""
    try:
        function: Callable[..., Any] = import_object(path)
    except ImportError as error:
        raise ConfigError(f"{key}: {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(f"{key}: {path!r} is not a function")
    return function


def import_object(path: str) -> Any:
    """Return the named object. Raises ImportError if the module or attribute is missing, or if the import fails."""
    module, _, attribute = path.partition(":")
    working_directory = os.getcwd()
    if not {"", working_directory} & set(sys.path):
        sys.path.append(working_directory)
    try:
        return getattr(import_module(module), attribute)
    except ImportError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, AttributeError) else f"{type(error).__name__}: {error}"
        raise ImportError(reason) from error
