"""A world of one rank and a tiny model with tied embeddings.

Why here: the learner needs a process group even alone.
Called by: pytest.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stack.ports import free_port
from tests.standins.tiny_model import make_tokenizer, make_weights


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer(directory, vocab_size=400)
    make_weights(directory)
    return directory


@pytest.fixture(scope="session")
def alone() -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
