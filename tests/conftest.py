"""Settings for every test: property tests try the same examples on every machine and have no deadline."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.standins.tiny_model import make_tokenizer, make_weights

settings.register_profile("ratchet", derandomize=True, deadline=None)
settings.load_profile("ratchet")


@pytest.fixture(scope="session")
def own_environment() -> dict[str, str]:
    """Extra variables for the services of tests/integration/workflows/conftest.py; a folder can override it."""
    return {}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model with tied embeddings and a tokenizer of 400 entries."""
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer(directory, vocab_size=400)
    make_weights(directory)
    return directory
