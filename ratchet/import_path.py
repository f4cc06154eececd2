"""A user's own reward, loss, advantage, harness or sandbox service, named as `package.module:attribute`.

Why here: every place that takes one finds it in the same way and only words its own error.
Called by: `activities.graders.rewards`, `activities.harnesses.registry`, `training.loss`, `training.advantage`,
`stack.worker`.
"""

from importlib import import_module
from typing import Any


def import_object(path: str) -> Any:
    """Raises ImportError where the module, or the attribute in it, is missing, and where the module cannot be run, whatever it raises."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ImportError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, AttributeError) else f"{type(error).__name__}: {error}"
        raise ImportError(reason) from error
