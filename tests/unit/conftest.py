"""A process group of one rank, for tests that make a learner."""

from collections.abc import Iterator

import pytest

from stack.ports import free_port


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
