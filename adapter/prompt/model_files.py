"""Read JSON files of a Hugging Face model directory.

A missing or broken file is a mistake of the user and raises ConfigError.
"""

import json
from pathlib import Path
from typing import Any

from ratchet.errors import ConfigError


def read_json(model_path: Path, name: str, required: bool = True) -> Any:
    """Return the parsed file; {} if it is missing and not `required`.

    Raises ConfigError if a required file is missing, or if a file is not JSON.
    """
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
