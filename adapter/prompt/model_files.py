"""JSON files of a Hugging Face model directory.

Why here: a missing file is the user's mistake, said in one way.
Called by: `templates.py` and `tokens.py`.
"""

import json
from pathlib import Path
from typing import Any

from ratchet.errors import ConfigError


def read_json(model_path: Path, name: str, required: bool = True) -> Any:
    """Raises ConfigError where the file is missing, unless not `required` (then {}), or is no JSON."""
    try:
        return json.loads((model_path / name).read_text())
    except FileNotFoundError:
        if required:
            raise ConfigError(
                f"model directory {model_path} has no {name}; give a complete Hugging Face directory"
            ) from None
        return {}
    except ValueError as error:
        raise ConfigError(f"{model_path / name} is no JSON: {error}") from error
