"""Settings for every test: property tests try the same examples on every machine and have no deadline."""

import gc
import os
import ssl
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings

from ratchet.start_variables import start_variables
from stack.ports import free_port
from tests.standins.tiny_model import make_tokenizer, make_weights

os.environ |= start_variables(os.environ)  # before torch is imported, and before the workers of xdist start
settings.register_profile("ratchet", derandomize=True, deadline=None)
settings.load_profile("ratchet")

_TRUST = httpx.create_ssl_context()


def _ssl_context_once(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    return httpx.create_ssl_context(_TRUST if verify is True else verify, cert, trust_env)


# Each client reads the 140 certificates of the internet's authorities: 15 ms of CPU, for addresses that are plain HTTP.
httpx._transports.default.create_ssl_context = _ssl_context_once  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, which takes a fifth of that time and finds objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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


@pytest.fixture(scope="module")
def single_rank() -> Iterator[None]:
    """A gloo process group whose only rank is this process, with one compute thread.

    One per module, because every learner opens groups of its own: dozens of file descriptors that end with this one.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
