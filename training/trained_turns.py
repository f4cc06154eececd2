"""Entropy and log-ratio of every trained token of a step, gathered from all ranks by turn.

A rank copies two float16 numbers per trained token to the CPU, bin by bin; both were computed for the loss.

Shape legend: N = trained tokens of a bin, or of the step, K = tokens of a turn from its first to its last trained one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.trained_turns import Halves, TrainedTurn
from training.loss import TokenBatch
from training.packing import Bin

_Columns = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32], Halves]
"""Turn ids, rollout ids and chain positions, (N,) each, and entropies and log-ratios, (2, N)."""


class TrainedTurns:
    """The trained tokens of this rank's bins."""

    def __init__(self) -> None:
        self._bins: list[_Columns] = []

    def add(self, bin: Bin, tokens: TokenBatch, entropies: Tensor, masked: Tensor) -> None:
        """Add one bin; `masked` is not recorded, since the preset, the log-ratio and the advantage give it."""
        log_ratios = tokens.logprobs.detach() - tokens.behaviour
        values = torch.stack([entropies.detach(), log_ratios]).to(torch.float16).cpu().numpy()
        self._bins.append((bin.turn_ids, bin.rollout_ids, bin.chain_positions.astype(np.int32), values))

    def gathered(self, group: Any) -> list[TrainedTurn]:
        """Return the turns of all ranks on rank 0, [] on the others. A collective of `group`, a gloo group."""
        is_first = dist.get_rank() == 0
        everywhere: list[list[_Columns]] | None = [[] for _ in range(dist.get_world_size())] if is_first else None
        dist.gather_object(self._bins, everywhere, dst=0, group=group)
        bins = [one for of_rank in everywhere or [] for one in of_rank]
        return _turns(bins) if bins else []


def _turns(bins: list[_Columns]) -> list[TrainedTurn]:
    """Return one record per turn; no chain trains a token that another chain of its rollout trains."""
    turn_ids, rollout_ids, positions, values = (np.concatenate(column, axis=-1) for column in zip(*bins, strict=True))
    order = np.lexsort((positions, turn_ids))
    turn_ids, rollout_ids, positions, values = (
        column[..., order] for column in (turn_ids, rollout_ids, positions, values)
    )
    starts = np.flatnonzero(np.diff(turn_ids, prepend=turn_ids[:1] - 1))
    ends = np.append(starts[1:], len(turn_ids))
    found = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        offsets = positions[start:end] - positions[start]
        dense = np.full((2, int(offsets[-1]) + 1), np.nan, dtype=np.float16)
        dense[:, offsets] = values[:, start:end]
        found.append(TrainedTurn(int(turn_ids[start]), int(rollout_ids[start]), int(positions[start]), *dense))
    return found
