"""Let rank 0 read what every rank needs, so that files are read once and an error is every rank's."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
_READ_TIMEOUT = timedelta(hours=6)
"""Time limit of the collective in which ranks wait until rank 0 has read the files."""


def read_on_rank_zero(read: Callable[[], _T]) -> _T:
    """Return on every rank what `read` returns on rank 0, which may read files for long. A collective.

    Raises OSError with the class and the message of its error on every rank if `read` fails.
    """
    found: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            found[0] = read()
        except Exception as error:  # on this rank alone it would leave the others waiting
            found[1] = f"{type(error).__name__}: {error}"
    patient = dist.new_group(backend="gloo", timeout=_READ_TIMEOUT)
    dist.broadcast_object_list(found, src=0, group=patient)
    dist.destroy_process_group(patient)
    if found[1]:
        raise OSError(found[1])
    return found[0]  # type: ignore[no-any-return]
