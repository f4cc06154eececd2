"""Calls of the client that are refused before anything is asked of the stack."""

from pathlib import Path

import pytest

from client import Client
from ratchet.errors import ConfigError


def test_overrides_without_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="overrides a file"):
        Client(home=tmp_path).train({"model": "tiny"}, set=["training.steps=5"])
