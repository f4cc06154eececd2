"""Canary: a fixed text that learner and engine both score; where they disagree, the engine does not serve what its label says.

Why here: labels, checksums and digests all pass while an engine computes with a stale copy of a weight; only its answers tell.
Called by: `training/learner.py` (its own scores, published with the weights), `engine/weight_update.py` and `engine/server.py` (verdict).
No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TEXT = """\
def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

The test fails: median([]) raises IndexError, and the caller expects None.
"""
_MAX_TOKENS = 96
_MAX_MEAN_GAP = 0.1
"""In nats per token: bfloat16 on both sides differs by some hundredths, a stale tied output layer by half a nat."""
_CLEARLY_OLD = 0.25
"""An engine whose scores are this much closer to the version before has not moved, however small the step was."""


@dataclass(slots=True, frozen=True)
class CanaryVerdict:
    """`reason` None: the engine serves this version. Gaps in nats per token."""

    mean_gap: float
    max_gap: float
    reason: str | None


def canary_ids(model: Path) -> list[int]:
    """The text in the model's own tokens."""
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(model, local_files_only=True)(TEXT, add_special_tokens=False)[
        "input_ids"
    ]
    return ids[:_MAX_TOKENS]


def canary_row(ids: Sequence[int], logprobs: npt.NDArray[np.float32]) -> dict[str, Any]:
    """As `policy_version.canary` keeps it: `logprobs[n]` is of `ids[n + 1]`, at temperature 1."""
    return {"ids": list(ids), "logprobs": [round(float(value), 6) for value in logprobs]}


def judge_canary(
    engine: npt.NDArray[np.float32], version: dict[str, Any], before: dict[str, Any] | None
) -> CanaryVerdict:
    """Whether an engine that says it serves `version` does. `before`: the canary of the version that it served until now, if known."""
    gaps = np.abs(engine - np.array(version["logprobs"], dtype=np.float32))
    mean_gap, max_gap = float(gaps.mean()), float(gaps.max())
    if not np.isfinite(mean_gap) or mean_gap > _MAX_MEAN_GAP:
        return CanaryVerdict(
            mean_gap,
            max_gap,
            f"its logprobs differ from the learner's by {mean_gap:.3f} on average, at most {_MAX_MEAN_GAP} is noise",
        )
    if before is not None and before["ids"] == version["ids"]:
        old_gap = float(np.abs(engine - np.array(before["logprobs"], dtype=np.float32)).mean())
        if old_gap < _CLEARLY_OLD * mean_gap:
            return CanaryVerdict(
                mean_gap,
                max_gap,
                f"it still serves the weights before: {old_gap:.2g} from theirs, {mean_gap:.2g} from the new ones",
            )
    return CanaryVerdict(mean_gap, max_gap, None)
