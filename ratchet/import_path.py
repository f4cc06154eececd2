"""Import a user's own reward, loss, advantage, harness or sandbox service by `package.module:attribute`."""

from importlib import import_module
from typing import Any


def import_object(path: str) -> Any:
    """Return the named object. Raises ImportError if the module or attribute is missing, or if the import fails."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ImportError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, AttributeError) else f"{type(error).__name__}: {error}"
        raise ImportError(reason) from error
