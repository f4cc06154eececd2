"""A tokenizer and chat template that are trained when the tests start: exactness depends on real tokenizers, and none
is downloaded.
"""

from pathlib import Path

import pytest

from adapter.prompt.renderer import Renderer
from tests.standins.tiny_model import make_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> Renderer:
    return Renderer(model_dir)
