"""Read JSON files of a Hugging Face model directory.

A missing or broken file is a mistake of the user and raises ConfigError.
"""

import json
from pathlib import Path
from typing import Any

from ratchet.errors import ConfigError


def read_json(model_path: Path, name: str, required: bool = True) -> Any:
    """Raises ConfigError if the file is not JSON or is missing; a missing one that is not `required` gives {}."""
    try:
        return json.loads((model_path / name).read_text())
    except FileNotFoundError:
        if required:
            raise ConfigError(
                f"model directory {model_path} has no {name}; give a complete Hugging Face directory"
            ) from None
        return {}
    except ValueError as error:
        raise ConfigError(f"{model_path / name} is not JSON: {error}") from error
