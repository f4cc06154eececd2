"""The trained tokens of a step whose ratios are furthest from 1, which explain a spike of the loss.

Every rank keeps a few of its tokens, bin by bin; after the step, the ranks' tokens are merged. The cost does not grow
with the step.

Shape legend: N = trained tokens of a bin, K = tokens that are kept.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.token_statistics import TrainedToken
from training.loss import TokenBatch
from training.packing import Bin

NUM_KEPT = 32
_NUM_COLUMNS = 9
_NOTHING = -1.0
"""Distance of a place that holds no token; that of a token is at least 0."""


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
