"""The record of a step's trained tokens, added to bin by bin and gathered from all ranks after the step.

Of every token entropy and log-ratio, by turn: a rank keeps two float16 numbers on its device until the step's end,
because a copy to the CPU would wait for each bin. Both were computed for the loss. And the few tokens whose ratios are
furthest from 1, which explain a spike of the loss; their cost does not grow with the step.

Shape legend: N = trained tokens of a bin, K = tokens of a turn from its first to its last trained one, or kept ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.token_statistics import Halves, TrainedToken, TrainedTurn
from training.loss import TokenBatch
from training.packing import Bin

NUM_KEPT = 32
_NUM_COLUMNS = 9
_NOTHING = -1.0
"""Distance of a place that holds no token; that of a token is at least 0."""


class _BinTokens(NamedTuple):
    """The trained tokens of a bin, without the rest of it, which may be large: three columns (N,) and values (2, N)."""

    turn_ids: npt.NDArray[np.int64]
    rollout_ids: npt.NDArray[np.int64]
    chain_positions: npt.NDArray[np.int64]
    values: Tensor


class TrainedTurns:
    """The trained tokens of this rank's bins."""

    def __init__(self) -> None:
        self._bins: list[_BinTokens] = []

    def add(self, bin: Bin, tokens: TokenBatch, entropies: Tensor, masked: Tensor) -> None:
        """Add one bin; `masked` is not recorded, since the preset, the log-ratio and the advantage give it."""
        log_ratios = tokens.logprobs.detach() - tokens.behaviour
        values = torch.stack([entropies.detach(), log_ratios]).to(torch.float16)
        self._bins.append(_BinTokens(bin.turn_ids, bin.rollout_ids, bin.chain_positions, values))

    def gathered(self, group: Any) -> list[TrainedTurn]:
        """Return the turns of all ranks by id on rank 0, [] on the others. A collective of `group`, a gloo group."""
        is_first = dist.get_rank() == 0
        everywhere: list[list[TrainedTurn]] | None = [[] for _ in range(dist.get_world_size())] if is_first else None
        found = [turn for tokens in self._bins for turn in _turns_of(tokens)]
        dist.gather_object(found, everywhere, dst=0, group=group)
        return sorted((one for of_rank in everywhere or [] for one in of_rank), key=lambda one: one.turn_id)


def _turns_of(tokens: _BinTokens) -> Iterator[TrainedTurn]:
    """Yield the bin's turns. No other bin has tokens of them: a turn is trained whole, in one chain."""
    *columns, values = tokens
    order = np.lexsort((tokens.chain_positions, tokens.turn_ids))
    turns_N, rollouts_N, positions_N = (column[order] for column in columns)
    values_2N = values.cpu().numpy()[:, order]
    starts = np.unique(turns_N, return_index=True)[1].tolist()
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        values_2K = _dense(positions_N[start:end], values_2N[:, start:end])
        yield TrainedTurn(int(turns_N[start]), int(rollouts_N[start]), int(positions_N[start]), *values_2K)


def _dense(positions: npt.NDArray[np.int64], values: Halves) -> Halves:
    """Return the values (2, K) from the first position to the last, which are sorted; NaN at positions between them."""
    offsets = positions - positions[0]
    if offsets[-1] == len(offsets) - 1:
        return values
    dense = np.full((2, int(offsets[-1]) + 1), np.nan, dtype=np.float16)
    dense[:, offsets] = values
    return dense


class LargestRatios:
    """The K trained tokens with the largest |learner's logprob - recorded logprob|, in rows of float64.

    Columns: the distance, then the fields of `TrainedToken` in their order.
    """

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.full((NUM_KEPT, _NUM_COLUMNS), _NOTHING, dtype=torch.float64, device=device)

    def add(self, bin: Bin, tokens: TokenBatch, entropies: Tensor, masked: Tensor) -> None:
        """Add one bin. `masked`: bool (N,), tokens that the loss gives no gradient."""
        if not len(bin.behaviour):
            return
        with torch.no_grad():
            device = self._rows.device
            gaps = (tokens.logprobs - tokens.behaviour).abs()
            known_gaps = torch.where(gaps.isfinite(), gaps, _NOTHING)  # rows with NaN could not be shown
            distances, places = known_gaps.topk(min(NUM_KEPT, len(bin.behaviour)))
            at = places.cpu().numpy()
            known = [bin.rollout_ids[at], bin.turn_ids[at], bin.chain_positions[at], bin.targets[bin.predictions[at]]]
            columns = [
                distances,
                *(torch.from_numpy(values).to(device) for values in known),
                *(values[places] for values in (tokens.behaviour, tokens.logprobs, entropies, masked)),
            ]
            found = torch.stack([column.to(torch.float64) for column in columns], dim=1)
        self._rows = _largest(torch.cat([self._rows, found]))

    def merged(self) -> list[TrainedToken]:
        """Return the largest of all ranks, the largest first, equal on every rank. A collective."""
        everywhere = [torch.empty_like(self._rows) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, self._rows)
        rows = torch.cat(everywhere)  # in the order of the ranks, so that every rank breaks ties alike
        return [
            TrainedToken(int(rollout), int(turn), int(position), int(token), behaviour, logprob, entropy, bool(masked))
            for distance, rollout, turn, position, token, behaviour, logprob, entropy, masked in _largest(rows).tolist()
            if distance != _NOTHING
        ]


def _largest(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].argsort(descending=True, stable=True)[:NUM_KEPT]]
