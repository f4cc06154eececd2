"""The experts that an engine chose for each token of a mixture of experts.

They are recorded with a turn and replayed by the learner (`training/router_replay.py`), whose own router would choose
other experts for some tokens, because it rounds differently.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

ExpertIds = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
"""(tokens, layers, experts per token); uint16 if a layer has more than 256 experts, 0 in layers without experts."""


@dataclass(slots=True, frozen=True)
class RoutedExperts:
    """The experts of T tokens. `known`: bool (T,), whether they were recorded; `ids` (T, ...) are 0 if not."""

    ids: ExpertIds
    known: npt.NDArray[np.bool_]

    @classmethod
    def unknown(cls, num_tokens: int, like: ExpertIds | None = None) -> Self:
        """Return `num_tokens` tokens of which nothing is known, with the layers and dtype of `like`."""
        pattern = np.empty((0, 0, 0), np.uint8) if like is None else like
        ids = np.zeros((num_tokens, *pattern.shape[1:]), pattern.dtype)
        return cls(ids, np.zeros(num_tokens, np.bool_))

    def fill(self, start: int, ids: ExpertIds) -> None:
        """Record the experts of the tokens from `start` on, in place."""
        self.ids[start : start + len(ids)] = ids
        self.known[start : start + len(ids)] = True

    def cut(self, end: int) -> Self:
        return type(self)(self.ids[:end], self.known[:end])
